"""The maths of a DSpark draft in plain torch, for every published layout.

A round, with P the position of its anchor: `Taps` collects what the draft reads of the target's
forward pass, `append_context` turns it into one row of each layer's cache for every committed
token, `block` runs the anchor and N - 1 mask tokens at positions P .. P + N - 1 over that cache and
chooses N drafts, left to right. The rows of the block itself are never cached: after verification
the committed tokens get theirs from the target.

Functions take a `Rounding`, as in `model/reference.py`; under ROUNDED bf16 is rounded where the
target's stages round it, and after a rotation. A cache row of a layer is [latent after its norm |
rotated key part] for MLA, and [rotated keys | values] of all heads for GQA. Formulas:
docs/speculative.md. Not meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kdecode.config import Activation, GqaConfig, MlaConfig, ModelConfig
from kdecode.config_draft import DraftConfig, RopeConfig
from kdecode.model.draft_parameters import DraftLayerParameters, DraftParameters, GqaParameters
from kdecode.model.parameters import MlaParameters, ModelParameters
from kdecode.model.reference import embed, mix
from kdecode.model.reference_common import Rounding, gated_mlp, linear, rms_norm
from kdecode.model.reference_mla import mla_up

_SILU = Activation("silu")


class Taps:
    """What a draft reads of one forward pass of the target: pass `on_layer` to its `Options`."""

    def __init__(
        self,
        draft: DraftConfig,
        target: ModelConfig,
        parameters: ModelParameters,
        token_ids: Tensor,
        rounding: Rounding,
    ) -> None:
        self._draft, self._target, self._parameters = draft, target, parameters
        self._rounding = rounding
        self._before = embed(parameters, token_ids, rounding)
        self._snapshots: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}

    def on_layer(self, layer: int, prefix: Tensor) -> None:
        """prefix [T, M] after a layer."""
        if self._target.is_snapshot_layer(layer):
            self._snapshots.append(self._before)
        if layer in self._draft.taps:
            self._taken[layer] = self._stream(layer, prefix)
        self._before = prefix

    def _stream(self, layer: int, prefix: Tensor) -> Tensor:
        if self._draft.tap_stream == "prefix" or not self._snapshots:
            return prefix
        layers = self._parameters.layers
        is_last = layer + 1 == len(layers)
        weights = self._parameters.final_mix if is_last else layers[layer + 1].attn_mix
        snapshots = torch.stack(self._snapshots)
        return mix(weights, prefix, snapshots, self._target.rms_eps, self._rounding)

    def rows(self) -> Tensor:
        """[T, taps, M], in the order of the layers."""
        missing = [layer for layer in self._draft.taps if layer not in self._taken]
        if missing:
            raise ValueError(f"The forward pass has not come past the layers {missing}.")
        return torch.stack([self._taken[layer] for layer in self._draft.taps], dim=1)


@dataclass
class DraftState:
    """One request's cache: for each layer of the draft a row [width] for each committed token."""

    rows: list[Tensor]

    @staticmethod
    def new(config: DraftConfig, rounding: Rounding) -> DraftState:
        empty = rounding.narrow(torch.zeros(0, config.cache_width))
        return DraftState([empty] * config.num_layers)

    @property
    def num_tokens(self) -> int:
        return int(self.rows[0].shape[0])


def append_context(
    p: DraftParameters, config: DraftConfig, state: DraftState, taps: Tensor, rounding: Rounding
) -> None:
    """Caches the next T committed tokens of a request. taps [T, taps, M]: `Taps.rows`."""
    context = context_rows(p, config, taps, rounding)
    positions = torch.arange(state.num_tokens, state.num_tokens + taps.shape[0])
    for number, layer in enumerate(p.layers):
        new = cache_rows(layer, config, context, positions, rounding)
        state.rows[number] = torch.cat([state.rows[number], new])


def context_rows(
    p: DraftParameters, config: DraftConfig, taps: Tensor, rounding: Rounding
) -> Tensor:
    """taps [T, taps, M] -> [T, M]."""
    if p.tap_norms is not None:
        normed = [
            rms_norm(taps[:, place], weight, config.rms_eps, rounding)
            for place, weight in enumerate(p.tap_norms)
        ]
        taps = torch.stack(normed, dim=1)
    projected = linear(taps.flatten(1), p.context_proj, rounding)
    return rms_norm(projected, p.context_norm, config.rms_eps, rounding)


def cache_rows(
    layer: DraftLayerParameters,
    config: DraftConfig,
    x: Tensor,
    positions: Tensor,
    rounding: Rounding,
) -> Tensor:
    """The cache row of each row of x [T, M], which is context, or the block after its norm."""
    p, attention = layer.attention, config.attention
    if isinstance(p, MlaParameters) and isinstance(attention, MlaConfig):
        both = linear(x, p.kv_a_proj, rounding)
        latent, key = torch.split(both, [attention.kv_rank, attention.rope_dim], dim=-1)
        latent = rms_norm(latent, p.kv_a_norm, attention.latent_norm_eps, rounding)
        return torch.cat([latent, rotate(config.rope, key, positions, rounding)], dim=-1)
    assert isinstance(p, GqaParameters)
    assert isinstance(attention, GqaConfig)
    key = linear(x, p.k_proj, rounding).view(-1, attention.num_kv_heads, attention.head_dim)
    key = rms_norm(key, p.k_norm, config.rms_eps, rounding)
    key = rotate(config.rope, key, positions, rounding)
    return torch.cat([key.flatten(1), linear(x, p.v_proj, rounding)], dim=-1)


def frequencies(rope: RopeConfig) -> Tensor:
    """Radians a position of each pair of channels, [dim / 2] fp64."""
    pairs = torch.arange(rope.dim // 2, dtype=torch.float64)
    plain = rope.theta ** (-2 * pairs / rope.dim)
    if rope.factor == 1.0:
        return plain

    def pair_that_turns(times: float) -> float:
        """The pair that turns so many times within the original context."""
        turns = rope.original_positions / (times * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), rope.dim - 1)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def rotate(rope: RopeConfig, x: Tensor, positions: Tensor, rounding: Rounding) -> Tensor:
    """Turns the last axis of x [T, ..., dim] by its position, rounded once."""
    angles = positions.double().unsqueeze(-1) * frequencies(rope).to(positions.device)
    shape = (x.shape[0], *[1] * (x.dim() - 2), rope.dim // 2)
    cos = rounding.wide(angles.cos() * rope.amplitude).view(shape)
    sin = rounding.wide(angles.sin() * rope.amplitude).view(shape)
    wide = rounding.wide(x)
    if rope.is_interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = wide.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return rounding.narrow(turned)


class Block(NamedTuple):
    """N drafts: tokens, the logits each was chosen from [N, vocab], confidence [N] or None."""

    tokens: tuple[int, ...]
    logits: Tensor
    confidence: Tensor | None


def block(
    p: DraftParameters,
    config: DraftConfig,
    target: ModelParameters,
    state: DraftState,
    anchor: int,
    num_drafts: int,
    choose: Callable[[int, Tensor], int],
    rounding: Rounding,
) -> Block:
    """Drafts the tokens behind the anchor, whose position is the number of cached tokens.

    choose(place, logits [vocab]) gives draft ``place``; each sees the one before it.
    """
    hidden = block_hidden(p, config, target, state, anchor, num_drafts, rounding)
    head = target.lm_head if p.lm_head is None else p.lm_head
    base = rounding.wide(linear(hidden, head, rounding))
    tokens: list[int] = []
    logits, confidence = [], []
    previous = anchor
    for place in range(num_drafts):
        row = base[place] + markov_bias(p, previous, rounding)
        logits.append(row)
        if p.confidence is not None:
            confidence.append(expected_acceptance(p, hidden[place], previous, rounding))
        previous = choose(place, row)
        tokens.append(previous)
    return Block(
        tuple(tokens),
        torch.stack(logits) if logits else base,
        torch.stack(confidence) if confidence else None,
    )


def markov_bias(p: DraftParameters, previous: int, rounding: Rounding) -> Tensor:
    """What the token before adds to a draft's logits, [vocab], not rounded."""
    return rounding.wide(p.markov_out) @ rounding.wide(p.markov_in[previous])


def expected_acceptance(
    p: DraftParameters, hidden: Tensor, previous: int, rounding: Rounding
) -> Tensor:
    """The confidence head: how likely a draft is accepted if all before it are. hidden [M]."""
    if p.confidence is None:
        raise ValueError("The draft has no confidence head.")
    features = torch.cat([rounding.wide(hidden), rounding.wide(p.markov_in[previous])])
    score = features @ rounding.wide(p.confidence.weight) + rounding.wide(p.confidence.bias)[0]
    return torch.sigmoid(score)


def block_hidden(
    p: DraftParameters,
    config: DraftConfig,
    target: ModelParameters,
    state: DraftState,
    anchor: int,
    num_rows: int,
    rounding: Rounding,
) -> Tensor:
    """[N, M] after the last norm; row k is about the token at the anchor's position + k + 1."""
    tokens = torch.tensor(([anchor] + [config.mask_id] * (num_rows - 1))[:num_rows]).long()
    table = target.embed if p.embed is None else p.embed
    x = rounding.narrow(table[tokens])
    eps = config.rms_eps
    for number, layer in enumerate(p.layers):
        h = rms_norm(x, layer.input_norm, eps, rounding)
        attended = _attend(layer, config, h, state.rows[number], rounding)
        x = _add(x, linear(attended, layer.attention.o_proj, rounding), rounding)
        h = rms_norm(x, layer.post_norm, eps, rounding)
        x = _add(x, gated_mlp(h, layer.mlp, _SILU, rounding), rounding)
    return rms_norm(x, p.norm, eps, rounding)


def _add(x: Tensor, delta: Tensor, rounding: Rounding) -> Tensor:
    return rounding.narrow(rounding.wide(x) + rounding.wide(delta))


def _attend(
    layer: DraftLayerParameters, config: DraftConfig, h: Tensor, cached: Tensor, rounding: Rounding
) -> Tensor:
    """h [N, M] over the cache [C, width] and the block's own rows -> [N, H*V]."""
    count = h.shape[0]
    positions = torch.arange(cached.shape[0], cached.shape[0] + count)
    own = cache_rows(layer, config, h, positions, rounding)
    # What lies behind the window is not read at all, whatever it holds.
    first = 0 if config.window is None else max(0, cached.shape[0] - config.window)
    rows = torch.cat([cached[first:], own])
    is_hidden = torch.zeros(count, rows.shape[0], dtype=torch.bool)
    if config.is_causal:
        is_hidden[:, rows.shape[0] - count :] = torch.ones(count, count).triu(1).bool()
    p, attention = layer.attention, config.attention
    if isinstance(p, MlaParameters) and isinstance(attention, MlaConfig):
        return _mla(p, attention, config.rope, h, rows, is_hidden, positions, rounding=rounding)
    assert isinstance(p, GqaParameters)
    assert isinstance(attention, GqaConfig)
    query = linear(h, p.q_proj, rounding).view(count, attention.num_heads, attention.head_dim)
    query = rms_norm(query, p.q_norm, config.rms_eps, rounding)
    query = rounding.wide(rotate(config.rope, query, positions, rounding))
    split = (rows.shape[0], 2, attention.num_kv_heads, attention.head_dim)
    shared = attention.num_heads // attention.num_kv_heads
    key, value = rounding.wide(rows).view(split).repeat_interleave(shared, dim=2).unbind(1)
    scale = attention.head_dim**-0.5 * config.rope.score_scale
    weights = _weights(torch.einsum("nhd,chd->nhc", query, key) * scale, is_hidden)
    return rounding.narrow(torch.einsum("nhc,chd->nhd", weights, value).flatten(1))


def _mla(
    p: MlaParameters,
    mla: MlaConfig,
    rope: RopeConfig,
    h: Tensor,
    rows: Tensor,
    is_hidden: Tensor,
    positions: Tensor,
    *,
    rounding: Rounding,
) -> Tensor:
    """The absorbed form, as `reference_mla` has it, with rotation."""
    if p.q_a_proj is None or p.q_a_norm is None or p.q_b_proj is None:
        raise ValueError("An MLA draft has a query of low rank; a part of it is absent.")
    low = rms_norm(linear(h, p.q_a_proj, rounding), p.q_a_norm, mla.latent_norm_eps, rounding)
    heads = linear(low, p.q_b_proj, rounding).view(-1, mla.num_heads, mla.qk_dim)
    nope, turned = torch.split(heads, [mla.nope_dim, mla.rope_dim], dim=-1)
    w_uk, w_uv = mla_up(p, mla, rounding)
    latent = rounding.narrow(torch.einsum("nhd,hdl->nhl", rounding.wide(nope), w_uk))
    query = torch.cat([latent, rotate(rope, turned, positions, rounding)], dim=-1)
    wide = rounding.wide(rows)
    scores = rounding.wide(query) @ wide.T * (mla.qk_dim**-0.5 * rope.score_scale)
    read = rounding.narrow(_weights(scores, is_hidden) @ wide[:, : mla.kv_rank])
    value = torch.einsum("nhl,hvl->nhv", rounding.wide(read), w_uv)
    return rounding.narrow(value.flatten(1))


def _weights(scores: Tensor, is_hidden: Tensor) -> Tensor:
    """Softmax of scores [N, H, C] over the rows that each row may see; is_hidden [N, C]."""
    return torch.softmax(scores.masked_fill(is_hidden.unsqueeze(1), float("-inf")), dim=-1)
