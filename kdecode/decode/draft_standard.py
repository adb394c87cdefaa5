"""A draft's forward in torch, for any rows of any requests: what `auto` is to the target.

Owns the draft's packed weights, the writing of its cache rows and one round's block. The maths and
the rounding points are `model/draft_reference.py`'s; docs/speculative.md has the formulas. Does not
know how drafts are chosen from logits, nor requests' life cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, GqaConfig, MlaConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode.draft_rows import Angles, ContextWeights, DraftRows, token_positions
from kdecode.kernels.common.norm import rms_norm
from kdecode.kernels.linear.product import ProductSettings, make_linear
from kdecode.model.draft_layout import PackedDraft, PackedDraftLayer, PackedDraftMla
from kdecode.model.layout import PackedModel
from kdecode.model.outline import outline_bytes


@dataclass(frozen=True)
class ContextRows:
    """Committed tokens of one request: positions start, start + 1, ... and what was tapped there.

    pages: of the request, enough for them. taps [T, taps, M] bf16.
    """

    start: int
    pages: tuple[int, ...]
    taps: Tensor


@dataclass(frozen=True)
class DraftRequest:
    """A request that is to get drafts: its newest token, and the rows cached before it."""

    anchor: int
    num_tokens: int
    pages: tuple[int, ...]


class DraftBlock(NamedTuple):
    """For each request its drafts, and what the confidence head expects of each, if there is one.

    confidence: that a draft holds if all before it do.
    """

    tokens: list[tuple[int, ...]]
    confidence: list[tuple[float, ...]] | None


# (place of the draft, logits [B, vocab] fp32) -> a token for each request.
Choose = Callable[[int, Tensor], Sequence[int]]


def first_choices(place: int, logits: Tensor) -> list[int]:
    """The `Choose` of greedy drafts. A forward that knows it may choose where its logits are."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


class StandardDraft:
    """target: whose embedding and head the draft uses where it has none of its own.

    A call leaves torch with the engine's thread count, as a step of the target does.
    """

    def __init__(
        self,
        packed: PackedDraft,
        config: DraftConfig,
        target: PackedModel,
        caches: Caches,
        engine: EngineConfig,
    ) -> None:
        self.config = config
        self._packed = packed
        self._caches = caches
        self._device = engine.device
        self._num_threads = engine.resolved_threads()
        self._embed = target.embed if packed.embed is None else packed.embed
        head = target.head if packed.head is None else packed.head
        self._head_bytes = head.num_bytes
        self._head = make_linear(head, ProductSettings(engine.device, engine.isa))
        weights = ContextWeights.of_torch(packed)
        self._rows = DraftRows(config, weights, caches, engine.device)

    def append(self, parts: Sequence[ContextRows]) -> None:
        """Caches the rows of committed tokens, in every layer."""
        torch.set_num_threads(self._num_threads)
        spans = [(part.start, part.taps.shape[0]) for part in parts]
        tokens = self._caches.page_tokens
        places = [
            part.pages[position // tokens] * tokens + position % tokens
            for part, (start, count) in zip(parts, spans, strict=True)
            for position in range(start, start + count)
        ]
        taps = torch.cat([part.taps for part in parts])
        self._rows.append(taps, token_positions(spans), torch.tensor(places))

    def block(
        self, requests: Sequence[DraftRequest], num_drafts: int, choose: Choose
    ) -> DraftBlock:
        """Drafts of each request for the tokens behind its anchor, strictly left to right."""
        hidden, base = self.stack(requests, num_drafts)
        with torch.no_grad():
            previous = [request.anchor for request in requests]
            chosen, confidence = [], []
            for place in range(num_drafts):
                markov = self._packed.markov_in[torch.tensor(previous, device=self._device)]
                logits = base[:, place] + F.linear(markov.float(), self._packed.markov_out)
                if self._packed.confidence is not None:
                    confidence.append(self._expected(hidden[:, place], markov))
                previous = list(choose(place, logits))
                chosen.append(previous)
            tokens = [tuple(drafts) for drafts in zip(*chosen, strict=True)]
            if not confidence:
                return DraftBlock(tokens, None)
            rows = torch.stack(confidence, dim=1).tolist()
            return DraftBlock(tokens, [tuple(row) for row in rows])

    def stack(self, requests: Sequence[DraftRequest], num_drafts: int) -> tuple[Tensor, Tensor]:
        """Hidden rows [B, N, M] and logits [B, N, vocab] fp32, before any token is chosen."""
        torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            hidden = self._hidden(requests, num_drafts)
            return hidden, self._head(hidden.flatten(0, 1)).float().view(*hidden.shape[:2], -1)

    @property
    def stack_bytes(self) -> int:
        """Weights that a block reads up to its logits, but for rows of the embedding."""
        layers = sum(outline_bytes(layer) for layer in self._packed.layers)
        return layers + self._head_bytes

    @property
    def markov_bytes(self) -> int:
        """Weights that one Markov product reads."""
        return outline_bytes(self._packed.markov_out)

    @property
    def append_bytes(self) -> int:
        """Weights that caching any number of committed tokens reads."""
        parts = [layer.attention.cache_proj for layer in self._packed.layers]
        return sum(outline_bytes(part) for part in (self._packed.context_proj, *parts))

    def _expected(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """The confidence head: [B, M], [B, R] -> [B]."""
        assert self._packed.confidence is not None
        weight, bias = self._packed.confidence
        return torch.sigmoid(torch.cat([hidden, markov], dim=-1).float() @ weight + bias)

    def _hidden(self, requests: Sequence[DraftRequest], num_rows: int) -> Tensor:
        """[B, N, M] after the last norm; row k is about the token k + 1 behind the anchor."""
        config, packed = self.config, self._packed
        masks = [config.mask_id] * (num_rows - 1)
        tokens = [token for request in requests for token in (request.anchor, *masks)]
        x = self._embed[torch.tensor(tokens, device=self._device)]
        spans = [(request.num_tokens, num_rows) for request in requests]
        angles = self._rows.angles(token_positions(spans))
        for number, layer in enumerate(packed.layers):
            h = rms_norm(x, layer.input_norm, config.rms_eps)
            own = self._rows.rows(number, h, angles)
            query = self._query(layer, h, angles)  # [B*N, H, width]
            parts = zip(
                requests, torch.split(query, num_rows), torch.split(own, num_rows), strict=True
            )
            read = torch.cat([self._attend(number, *part) for part in parts])
            if isinstance(layer.attention, PackedDraftMla):
                # [B*N, H, rank] by each head's own matrix.
                read = torch.bmm(read.transpose(0, 1), layer.attention.w_uv).transpose(0, 1)
            x = x + F.linear(read.flatten(1), layer.attention.o_proj)
            h = rms_norm(x, layer.post_norm, config.rms_eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear((F.silu(gate.float()) * up.float()).to(h.dtype), layer.down)
        return rms_norm(x, packed.norm, config.rms_eps).view(len(requests), num_rows, -1)

    def _query(self, layer: PackedDraftLayer, h: Tensor, angles: Angles) -> Tensor:
        """[T, H, width of what it is compared with]."""
        p, attention = layer.attention, self.config.attention
        if isinstance(p, PackedDraftMla) and isinstance(attention, MlaConfig):
            low = rms_norm(F.linear(h, p.q_a), p.q_norm, attention.latent_norm_eps)
            heads = F.linear(low, p.q_b).view(-1, attention.num_heads, attention.qk_dim)
            nope, turned = torch.split(heads, [attention.nope_dim, attention.rope_dim], dim=-1)
            latent = torch.bmm(nope.transpose(0, 1), p.w_uk).transpose(0, 1)
            return torch.cat([latent, self._rows.rotate(turned, angles)], dim=-1)
        assert isinstance(attention, GqaConfig)
        assert not isinstance(p, PackedDraftMla)
        heads = F.linear(h, p.q_proj).view(-1, attention.num_heads, attention.head_dim)
        return self._rows.rotate(rms_norm(heads, p.q_norm, self.config.rms_eps), angles)

    def _attend(self, number: int, request: DraftRequest, query: Tensor, own: Tensor) -> Tensor:
        """query [N, H, width] over the request's context and the block's own rows [N, width]."""
        attention, scale = self.config.attention, self.config.rope.score_scale
        rows = torch.cat([self._context_rows(number, request), own])
        if isinstance(attention, MlaConfig):
            keys = values = rows.unsqueeze(0)
            scale *= attention.qk_dim**-0.5
            num_groups = 1
        else:
            shape = (rows.shape[0], 2, attention.num_kv_heads, attention.head_dim)
            keys, values = rows.view(shape).permute(1, 2, 0, 3)
            scale *= attention.head_dim**-0.5
            num_groups = attention.num_kv_heads
        out = _grouped(query, keys, values, num_groups, scale, is_causal=self.config.is_causal)
        return out[..., : attention.kv_rank] if isinstance(attention, MlaConfig) else out

    def _context_rows(self, number: int, request: DraftRequest) -> Tensor:
        """The committed rows that a round sees, [C, width]; nothing before the window is read."""
        count, tokens = request.num_tokens, self._caches.page_tokens
        first = 0 if self.config.window is None else max(0, count - self.config.window)
        pages = request.pages[first // tokens : -(-count // tokens)]
        index = torch.tensor(pages, device=self._device)
        rows = self._caches.draft[number].index_select(0, index).flatten(0, 1)
        skipped = first // tokens * tokens
        return rows[first - skipped : count - skipped]


def _grouped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_groups: int,
    scale: float,
    *,
    is_causal: bool,
) -> Tensor:
    """query [N, H, width], keys and values [G, C + N, width] -> [N, H, width].

    The heads of a group are the query positions of one attention, so that its rows are read once.
    is_causal: a row sees the block's rows up to itself, and all of the context.
    """
    count, heads, width = query.shape
    grouped = query.transpose(0, 1).reshape(num_groups, -1, width)  # a head's rows together
    mask = None
    if is_causal:
        context = keys.shape[1] - count
        mask = torch.ones(count, keys.shape[1], dtype=torch.bool, device=query.device)
        mask = mask.tril_(context).repeat(heads // num_groups, 1)
    out = F.scaled_dot_product_attention(
        grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
    )
    return out[0].reshape(heads, count, -1).transpose(0, 1)
