"""Attention over a context of which every rank has some positions.

Either the queries go to the rows, or the rows to the queries. A few queries do: each rank attends
for the heads of all over the rows that it has, and gets the parts for its own heads back. What is
sent for one query is then of the size of a few hundred cache rows, whatever the context is; for the
many queries of a prompt's chunk its context is the smaller of the two, and comes as it is stored.
Owns the exchanges. Does not know weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.contract import Buffers, Exchange
from kdecode.kernels.mla_attention.partial import merge, partial_attention
from kdecode.kernels.mla_attention.rows import CacheRows
from kdecode.parallel.context import ContextShare


@dataclass(frozen=True)
class OtherRanks:
    """Of one layer. mla: the heads of this rank; cache: the rows that it has of every request."""

    mla: MlaConfig
    context: ContextShare
    cache: CacheRows
    buffers: Buffers

    def attend(self, query: Tensor, spans: Sequence[RequestSpan]) -> Tensor:
        """Absorbed queries [n, H, width] of the rows of these requests -> latents [n, H, kv_rank].

        All rows are in the caches, each on its rank.
        """
        mla, size = self.mla, self.context.ranks.size
        count, heads = query.shape[0], mla.num_heads
        everyone = self._exchange.gather(query.flatten(1)).view(count, size * heads, -1)
        parts, first = [], 0
        for span in spans:
            parts.append(self._part(everyone[first : first + span.num_rows], span))
            first += span.num_rows
        # [n, size * H, kv_rank + 1], a line to the rank whose head it is of.
        sent = torch.cat(parts).view(count, size, -1).transpose(0, 1).contiguous()
        received = self._exchange.swap(sent).view(size, count, heads, mla.kv_rank + 1)
        out, _ = merge(received[..., :-1], received[..., -1])
        return out.to(query.dtype)

    def rows(self, span: RequestSpan) -> Tensor:
        """All rows of a request, in their order [context, width] bf16."""
        size, interleave = self.context.ranks.size, self.context.interleave
        mine = self.cache.stored(span, self.context.padded_length(span.context_tokens))
        if self.cache.is_fp8:
            mine = mine.view(torch.uint8)
        # [turns, interleave, size, width]: what a rank has of a turn follows each other.
        gathered = self._exchange.gather(mine.contiguous()).view(-1, interleave, size, self._width)
        ordered = gathered.transpose(1, 2).reshape(-1, self._width)[: span.context_tokens]
        return self.cache.values(ordered.view(self.cache.pages.dtype))

    def _part(self, query: Tensor, span: RequestSpan) -> Tensor:
        """Attention of all heads over the rows that are here: out, and lse behind it, fp32."""
        seen = [self.context.length(span.start + row + 1) for row in range(span.num_rows)]
        rows = self.cache.values(self.cache.stored(span, seen[-1]))
        mla = self.mla
        out, lse = partial_attention(query, rows, seen, mla.kv_rank, mla.qk_dim**-0.5)
        return torch.cat([out, lse.unsqueeze(-1)], dim=-1)

    @property
    def _width(self) -> int:
        return self.mla.cache_width

    @property
    def _exchange(self) -> Exchange:
        exchange = self.buffers.exchange
        if exchange is None:
            raise ValueError("This plan has no exchange with the other ranks; it cannot run.")
        return exchange
