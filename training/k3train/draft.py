"""The DSpark draft in a form that trains: many rounds of one sequence in one pass.

Owns the forward pass over slots, the names of `kdecode.model.draft_roster`, for the MLA layout that
taps the running prefix. The maths is that of `kdecode.model.draft_reference`, against which tests
compare it. Knows no optimiser, no data and no files.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.target import rms_norm
from kdecode.config import MlaConfig
from kdecode.config_draft import DraftConfig
from kdecode.model.draft_reference import rotate
from kdecode.model.draft_roster import draft_slots
from kdecode.model.reference import GOLD32


class Rounds(NamedTuple):
    """Of B sequences with A anchors and N drafts each."""

    logits: Tensor  # [B, A, N, vocab]
    confidence: Tensor  # [B, A, N], before the sigmoid


class Draft:
    """Parameters by slot and the forward pass; embed and lm_head are the target's, frozen."""

    def __init__(
        self,
        config: DraftConfig,
        embed: Tensor,
        lm_head: Tensor,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not isinstance(config.attention, MlaConfig) or config.is_causal or config.has_tap_norms:
            raise ValueError("Only the MLA layout with a whole mask and no tap norms is trained.")
        self.config, self.dtype = config, dtype
        self._mla = config.attention
        self._embed, self._head = embed.detach().to(dtype), lm_head.detach().to(dtype)
        generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            slot: _initial(slot, spec.shape, config, generator).to(embed.device).requires_grad_()
            for slot, spec in draft_slots(config).items()
            if slot != "embed"
        }

    def state(self) -> dict[str, Tensor]:
        return dict(self.parameters)

    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for slot, tensor in self.parameters.items():
                tensor.copy_(state[slot])

    def __call__(self, taps: Tensor, ids: Tensor, anchors: Tensor, num_drafts: int) -> Rounds:
        """taps [B, T, taps, M] and ids [B, T] of the sequences, anchors [B, A] positions.

        The text itself is what each draft is given as the draft before it. An anchor is at most at
        T - num_drafts.
        """
        w = {s: p.to(self.dtype) if p.dim() >= 2 else p for s, p in self.parameters.items()}
        config, eps = self.config, self.config.rms_eps
        context = F.linear(taps.flatten(-2).to(self.dtype), w["context_proj"])
        context = rms_norm(context, w["context_norm"], eps)
        places = anchors.unsqueeze(-1) + torch.arange(num_drafts, device=ids.device)  # [B, A, N]
        previous = ids.gather(1, places.flatten(1)).view_as(places)
        tokens = torch.full_like(places, config.mask_id)
        tokens[..., 0] = previous[..., 0]
        is_seen = _seen(anchors, ids.shape[1], num_drafts)
        x = F.embedding(tokens, self._embed).flatten(1, 2)  # [B, A * N, M]
        for layer in range(config.num_layers):
            start = f"layers.{layer}."
            h = rms_norm(x, w[f"{start}input_norm"], eps)
            x = x + self._attend(w, f"{start}attention.", h, context, places.flatten(1), is_seen)
            h = rms_norm(x, w[f"{start}post_norm"], eps)
            gate, up = (F.linear(h, w[f"{start}mlp.{part}_proj"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{start}mlp.down_proj"])
        hidden = rms_norm(x, w["norm"], eps).view(*places.shape, -1)
        markov = F.embedding(previous, w["markov_in"])
        logits = F.linear(hidden, self._head) + F.linear(markov, w["markov_out"])
        features = torch.cat([hidden, markov], dim=-1)
        confidence = F.linear(features, w["confidence.proj"]).squeeze(-1) + w["confidence.bias"]
        return Rounds(logits, confidence)

    def _attend(
        self,
        w: dict[str, Tensor],
        start: str,
        h: Tensor,
        context: Tensor,
        positions: Tensor,
        is_seen: Tensor,
    ) -> Tensor:
        """h [B, R, M] over the context [B, T, M] and over itself, as is_seen [B, R, T + R] says."""
        mla, rope = self._mla, self.config.rope
        low = F.linear(h, w[f"{start}q_a_proj"])
        low = rms_norm(low, w[f"{start}q_a_norm"], mla.latent_norm_eps)
        query = F.linear(low, w[f"{start}q_b_proj"]).unflatten(-1, (mla.num_heads, -1))
        nope, turned = query.split([mla.nope_dim, mla.rope_dim], dim=-1)
        query = torch.cat([nope, self._rotate(turned, positions)], dim=-1)
        rows = F.linear(torch.cat([context, h], dim=1), w[f"{start}kv_a_proj"])
        latent, key = rows.split([mla.kv_rank, mla.rope_dim], dim=-1)
        latent = rms_norm(latent, w[f"{start}kv_a_norm"], mla.latent_norm_eps)
        before = torch.arange(context.shape[1], device=h.device).expand(h.shape[0], -1)
        key = self._rotate(key, torch.cat([before, positions], dim=1)).unsqueeze(-2)
        up = F.linear(latent, w[f"{start}kv_b_proj"]).unflatten(-1, (mla.num_heads, -1))
        up, value = up.split([mla.nope_dim, mla.v_dim], dim=-1)
        keys = torch.cat([up, key.expand(*up.shape[:-1], -1)], dim=-1)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=is_seen.unsqueeze(1),
            scale=mla.qk_dim**-0.5 * rope.score_scale,
        )
        return F.linear(out.transpose(1, 2).flatten(-2), w[f"{start}o_proj"])

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, R, ..., dim] by positions [B, R]."""
        flat = rotate(self.config.rope, x.flatten(0, 1), positions.flatten(), GOLD32)
        return flat.view_as(x).to(x.dtype)


def _seen(anchors: Tensor, tokens: int, num_drafts: int) -> Tensor:
    """[B, A * N, T + A * N]: the tokens before the round's anchor, and the round's own rows."""
    batch, rounds = anchors.shape
    before = torch.arange(tokens, device=anchors.device) < anchors.unsqueeze(-1)  # [B, A, T]
    before = before.repeat_interleave(num_drafts, dim=1)
    own = torch.eye(rounds, dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(num_drafts, 0)
    own = own.repeat_interleave(num_drafts, 1).expand(batch, -1, -1)
    return torch.cat([before, own], dim=-1)


def _initial(
    slot: str, shape: tuple[int, ...], config: DraftConfig, generator: torch.Generator
) -> Tensor:
    if slot in ("confidence.proj", "confidence.bias", "markov_out"):
        # No opinion to begin with.
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    spread = 1.0 if slot == "markov_in" else 1 / math.sqrt(shape[-1])
    if slot.endswith(("o_proj", "down_proj")):
        spread /= math.sqrt(2 * config.num_layers)
    return spread * torch.randn(shape, generator=generator)
