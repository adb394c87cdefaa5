"""mla_attention in torch: scaled_dot_product_attention in the form that costs less.

On a CPU, chunks with expanded keys take the native attention.
Decode rows: the heads are the query positions of one attention over the shared cache rows, so the
rows are read once for all heads. Chunks: absorbed while short, expanded above `_is_expanded`; the
rows of a last block of 64 that is not full by themselves, so that a row's form, and with it its
last bits, depend on its request's length and not on where its prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.kernels.common.norm import rms_norm
from kdecode.kernels.common.step import MAX_DECODE_ROWS, RequestSpan, StepTensors
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.linear.product import (
    Linear,
    make_head_linear,
    make_linear,
    unpack,
)
from kdecode.kernels.mla_attention.other_ranks import OtherRanks
from kdecode.kernels.mla_attention.rows import CacheRows

# Expanded keys and values that exist at a time; heads are taken in groups of this size.
_EXPANDED_BYTES = 128 * 2**20
# Rows of the products that expand are multiples of it: torch's library keeps prepared code for
# hundreds of sizes, which prompts of any length would fill for nothing.
_PRODUCT_ROWS = 64
# The block that the chunks of a prompt end on (`prefill.chunks.ALIGNMENT`).
_BLOCK_ROWS = 64
# How much sooner expanding pays with the native attention, which is faster than torch's.
_NATIVE_GAIN = 3


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Attention:
    """weights: the packed MLA layer."""
    assert problem.layer is not None
    mla, products = problem.config.mla, buffers.products
    caches, layer = buffers.caches, problem.layer
    cache, others = CacheRows(caches.pages[layer], caches.scales[layer]), None
    if not problem.context.is_whole:
        others = OtherRanks(mla, problem.context, cache, buffers)
    return Attention(
        mla=mla,
        weights=weights,
        q_b=None if weights.q_b is None else make_linear(weights.q_b, products),
        absorb=make_head_linear(weights.w_uk, mla.num_heads, products),
        value=make_head_linear(weights.w_uv, mla.num_heads, products),
        cache=cache,
        others=others,
        is_native=_is_native(mla, caches.pages[layer]),
        buffers=buffers,
    )


def _is_native(mla: MlaConfig, pages: Tensor) -> bool:
    """Whether there is native attention over expanded keys."""
    if pages.device.type != "cpu":
        return False
    from kdecode.kernels.mla_attention import native

    return native.takes(mla)


@dataclass(frozen=True)
class Attention:
    """One layer's, on the rows of any step. others: that have rows of the context, too."""

    mla: MlaConfig
    weights: Any
    q_b: Linear | None
    absorb: Linear
    value: Linear
    cache: CacheRows
    others: OtherRanks | None
    is_native: bool
    buffers: Buffers

    def run(self) -> None:
        step, proj = self.buffers.step, self.buffers["mla_proj"]
        query, gate = self._insert(proj, step.cache_rows, step.stored_rows)
        heads = self._query(query)
        if self.others is not None:
            value = self._shared(heads, self.others, step)
        elif not step.multi:
            value = self._single(heads)
        else:
            value = heads.new_empty(step.num_rows, self.mla.num_heads, self.mla.v_dim)
            if step.single:
                rows = step.single_rows
                value.index_copy_(0, rows, self._single(heads[rows]))
            for span in step.multi:
                value[span.first : span.last] = self._span(heads[span.first : span.last], span)
        self.buffers["attn_out"] = self._gated(value, gate)

    def run_span(self, span: RequestSpan, out: Tensor) -> None:
        """The rows of one request only, into their lines of out [R, H*v_dim]."""
        own = slice(span.first, span.last)
        places = self.buffers.step.cache_rows[own]
        query, gate = self._insert(self.buffers["mla_proj"][own], places, None)
        out[own] = self._gated(self._span(self._query(query), span), gate)

    def _shared(self, heads: Tensor, others: OtherRanks, step: StepTensors) -> Tensor:
        """Of a context that other ranks have rows of: [R, H, qk_dim] -> values [R, H, v_dim].

        Rows of requests with few new tokens go where the context is, all in one exchange; to the
        many rows of a prompt's chunk its context comes.
        """
        value = heads.new_empty(step.num_rows, self.mla.num_heads, self.mla.v_dim)
        spans = (*step.single, *step.multi)
        few = [span for span in spans if span.num_rows <= MAX_DECODE_ROWS]
        if few:
            rows = torch.cat([torch.arange(span.first, span.last) for span in few])
            rows = rows.to(heads.device)
            latents = others.attend(self._absorbed(heads[rows]), few)
            value.index_copy_(0, rows, self.value(latents))
        for span in step.multi:
            if span.num_rows > MAX_DECODE_ROWS:
                value[span.first : span.last] = self._span(heads[span.first : span.last], span)
        return value

    def _insert(self, proj: Tensor, places: Tensor, stored: Tensor | None) -> tuple[Tensor, Tensor]:
        """Writes cache rows of ``proj`` [T, columns]; returns its query and its gate.

        stored: the rows whose places are given; None for all.
        """
        query, latent, key_rest, gate = self._parts(proj)
        if stored is not None:
            latent, key_rest = latent[stored], key_rest[stored]
        self.cache.insert(places, self._cache_row(latent, key_rest))
        return query, gate

    def _parts(self, proj: Tensor) -> tuple[Tensor, ...]:
        """Columns of the projection: query, latent, the rest of the key, gate."""
        mla = self.mla
        gate_width = mla.num_heads * mla.v_dim if mla.has_output_gate else 0
        sizes = [
            proj.shape[1] - mla.cache_width - gate_width,
            mla.kv_rank,
            mla.rope_dim,
            gate_width,
        ]
        return torch.split(proj, sizes, dim=-1)

    def _cache_row(self, latent: Tensor, key_rest: Tensor) -> Tensor:
        """What is cached of a row [T, cache_width]."""
        normed = rms_norm(latent, self.weights.kv_norm, self.mla.latent_norm_eps)
        return torch.cat([normed, key_rest], dim=-1)

    def _gated(self, value: Tensor, gate: Tensor) -> Tensor:
        """[T, H, v_dim] -> [T, H*v_dim]."""
        out = value.flatten(1)
        return (out * gate.float().sigmoid_()).to(out.dtype) if gate.shape[1] else out

    def _query(self, columns: Tensor) -> Tensor:
        """[R, H, qk_dim], before absorption."""
        if self.q_b is not None:
            columns = self.q_b(rms_norm(columns, self.weights.q_norm, self.mla.latent_norm_eps))
        return columns.reshape(-1, self.mla.num_heads, self.mla.qk_dim)

    def _absorbed(self, heads: Tensor) -> Tensor:
        """[R, H, qk_dim] -> [R, H, cache_width]."""
        nope, rest = torch.split(heads, [self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        return torch.cat([self.absorb(nope), rest], dim=-1)

    def _single(self, heads: Tensor) -> Tensor:
        """One row of each request: [R, H, qk_dim] -> values [R, H, v_dim]."""
        return self.value(self.latents(self._absorbed(heads)))

    def latents(self, query: Tensor) -> Tensor:
        """Attention of one row of each request: [R, H, cache_width] -> [R, H, kv_rank]."""
        spans = self.buffers.step.single
        return torch.stack(
            [self._decode(query[row], self.cache.gather(span)) for row, span in enumerate(spans)]
        )

    def _decode(self, query: Tensor, rows: Tensor) -> Tensor:
        """query [H, cache_width], rows [C, cache_width] -> latent [H, kv_rank].

        Heads as positions, a group a thread.
        """
        groups = _head_groups(self.mla.num_heads, query.device)
        rows = rows.expand(1, groups, -1, -1)
        grouped = query.view(1, groups, -1, query.shape[-1])
        out = F.scaled_dot_product_attention(grouped, rows, rows, scale=self.mla.qk_dim**-0.5)
        return out.flatten(0, 2)[:, : self.mla.kv_rank]

    def _span(self, heads: Tensor, span: RequestSpan) -> Tensor:
        """The rows of one request: [T, H, qk_dim] -> values [T, H, v_dim]."""
        rows = self.cache.gather(span) if self.others is None else self.others.rows(span)
        tail = min(span.context_tokens % _BLOCK_ROWS, span.num_rows)
        head = span.num_rows - tail
        if not (head and tail and self._is_expanded(head) and not self._is_expanded(tail)):
            return self._last(heads, rows)
        first = self._last(heads[:head], rows[: len(rows) - tail])
        return torch.cat([first, self._last(heads[head:], rows)])

    def _last(self, heads: Tensor, rows: Tensor) -> Tensor:
        """Of the last positions of a context: [T, H, qk_dim], rows [C, width] -> [T, H, v_dim]."""
        tokens = heads.shape[0]
        if self._is_expanded(tokens):
            return self._expanded(heads, rows)
        absorbed = self._absorbed(heads)
        if tokens == 1:
            return self.value(self._decode(absorbed[0], rows).unsqueeze(0))
        query = absorbed.transpose(0, 1).unsqueeze(0)  # [1, H, T, width]
        shared = rows.expand(1, self.mla.num_heads, -1, -1)
        out = _causal(query, shared, shared, len(rows) - tokens, self.mla.qk_dim**-0.5)
        return self.value(out[0, :, :, : self.mla.kv_rank].transpose(0, 1))

    def _is_expanded(self, tokens: int) -> bool:
        """Whether expanding a cache row costs less than what it saves over ``tokens`` queries."""
        mla = self.mla
        saved = 2 * mla.cache_width - 2 * mla.qk_dim
        if self.is_native:
            saved *= _NATIVE_GAIN
        return tokens * saved > mla.kv_rank * (mla.nope_dim + mla.v_dim)

    def _expanded(self, heads: Tensor, rows: Tensor) -> Tensor:
        """Plain attention with keys and values of each head. rows [C, width] -> [T, H, v_dim]."""
        mla, context = self.mla, rows.shape[0]
        start = context - heads.shape[0]
        latent, rest = torch.split(rows, [mla.kv_rank, mla.rope_dim], dim=-1)
        isa = self.buffers.products.isa
        if self.is_native:
            return self._expanded_native(heads, latent, rest)
        w_uk = unpack(self.weights.w_uk, isa).view(mla.num_heads, mla.kv_rank, mla.nope_dim)
        w_uv = unpack(self.weights.w_uv, isa).view(mla.num_heads, mla.v_dim, mla.kv_rank)
        group = max(1, _EXPANDED_BYTES // (context * mla.qk_dim * 4))
        outs = []
        for begin in range(0, mla.num_heads, group):
            own = slice(begin, begin + group)
            expanded = torch.matmul(latent, w_uk[own])  # [h, C, nope_dim]
            keys = torch.cat([expanded, rest.expand(expanded.shape[0], -1, -1)], dim=-1)
            values = torch.matmul(latent, w_uv[own].transpose(1, 2))  # [h, C, v_dim]
            # One head width for keys and values is what torch's fused CPU attention takes.
            padded = F.pad(values, (0, mla.qk_dim - mla.v_dim))
            query = heads[:, own].transpose(0, 1).unsqueeze(0)
            attended = _causal(query, keys[None], padded[None], start, mla.qk_dim**-0.5)
            outs.append(attended[0, :, :, : mla.v_dim])
        return torch.cat(outs).transpose(0, 1)

    def _expanded_native(self, heads: Tensor, latent: Tensor, rest: Tensor) -> Tensor:
        """heads [T, H, qk_dim], latent [C, kv_rank], rest [C, rope_dim] -> [T, H, v_dim]."""
        from kdecode.kernels.mla_attention import native

        mla, isa = self.mla, self.buffers.products.isa
        count, context, scale = mla.num_heads, latent.shape[0], mla.qk_dim**-0.5
        w_uk = unpack(self.weights.w_uk, isa).view(count, mla.kv_rank, mla.nope_dim)
        w_uv = unpack(self.weights.w_uv, isa).view(count, mla.v_dim, mla.kv_rank)
        latent = F.pad(latent, (0, 0, 0, -context % _PRODUCT_ROWS)).contiguous()
        group = max(1, _EXPANDED_BYTES // (context * (mla.nope_dim + mla.v_dim) * 2))
        outs = []
        for begin in range(0, count, group):
            own = slice(begin, begin + group)
            # One product for the keys of all heads, one for their values.
            to_keys = w_uk[own].transpose(1, 2).reshape(-1, mla.kv_rank)
            keys = F.linear(latent, to_keys).view(len(latent), -1, mla.nope_dim)[:context]
            values = F.linear(latent, w_uv[own].flatten(0, 1))
            values = values.view(len(latent), -1, mla.v_dim)[:context]
            query = heads[:, own]
            outs.append(native.prompt_attention(query, keys, rest, values, scale, isa))
        return torch.cat(outs, dim=1)


def _head_groups(heads: int, device: torch.device) -> int:
    """As many equal groups of heads as there are threads to take one; 1 elsewhere than on a CPU."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return next(groups for groups in range(min(threads, heads), 0, -1) if heads % groups == 0)


def _causal(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Attention of positions start .. start + T - 1 over the first start + T keys."""
    if start == 0:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    tokens, context = query.shape[-2], keys.shape[-2]
    mask = torch.ones(tokens, context, dtype=torch.bool, device=query.device).tril_(start)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
