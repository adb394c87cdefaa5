"""Attention over a part of the context, and one attention out of several parts.

A part is the attention over its own rows alone, ``out``, and the logarithm of its sum of
exponentials, ``lse``, both fp32: all that others need to weigh it. A part without rows is zeros
with an ``lse`` of -inf and weighs nothing. What is not a number stays so. Parts are added up in
their order, so that everyone who merges the same parts gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rows that are widened to fp32, and scored, at a time.
_BLOCK_ROWS = 4096


def partial_attention(
    query: Tensor, rows: Tensor, seen: Sequence[int], kv_rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, H, kv_rank] and lse [T, H] of queries [T, H, width] over cache rows [C, width].

    seen: of each query, how many of the rows come before it or are its own. A row's first kv_rank
    numbers are its value. Softmax and sums in fp32.
    """
    count = max(seen, default=0)
    limits = torch.tensor(seen, device=query.device)
    wide = query.float() * scale
    parts = [
        _block(wide, rows[first : min(first + _BLOCK_ROWS, count)].float(), limits - first, kv_rank)
        for first in range(0, count, _BLOCK_ROWS)
    ]
    if not parts:
        lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        return wide.new_zeros(*query.shape[:2], kv_rank), lse
    return parts[0] if len(parts) == 1 else merge(*map(torch.stack, zip(*parts, strict=True)))


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs [P, ..., V] and lses [P, ...] of P parts -> those of all their rows together."""
    highest = _finite(lses.amax(0))
    weights = (lses - highest).exp()
    total, out = weights[0], weights[0].unsqueeze(-1) * outs[0]
    for weight, part in zip(weights[1:], outs[1:], strict=True):
        total = total + weight
        out = out + weight.unsqueeze(-1) * part
    return out / _divisor(total), highest + total.log()


def _block(query: Tensor, rows: Tensor, seen: Tensor, kv_rank: int) -> tuple[Tensor, Tensor]:
    """query [T, H, width] scaled, rows [C, width], seen [T]: all fp32 but the last."""
    scores = query @ rows.T  # [T, H, C]
    is_hidden = torch.arange(rows.shape[0], device=rows.device) >= seen.view(-1, 1, 1)
    scores.masked_fill_(is_hidden, float("-inf"))
    highest = _finite(scores.amax(-1))
    shares = scores.sub_(highest.unsqueeze(-1)).exp_()
    total = shares.sum(-1)
    return shares @ rows[:, :kv_rank] / _divisor(total), highest + total.log()


def _finite(highest: Tensor) -> Tensor:
    """Where there are no rows, any number does that -inf can be taken from."""
    return highest.masked_fill(highest == float("-inf"), 0.0)


def _divisor(total: Tensor) -> Tensor:
    """Where there are no rows the sum is 0, and so is what it divides."""
    return total.masked_fill(total == 0, 1.0).unsqueeze(-1)
