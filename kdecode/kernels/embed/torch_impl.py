"""embed in torch: the step's token ids were checked when its metadata was derived.

Of several ranks each has some rows of the table, and zeros for the tokens of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.ranked import exchange_of


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed model."""
    if problem.ranks.is_alone:
        return _Embed(weights.embed, problem.config.num_snapshots, buffers)
    first = problem.ranks.rank * problem.config.vocab_size
    return _PartEmbed(weights.embed, problem.config.num_snapshots, buffers, first)


@dataclass(frozen=True)
class _Embed:
    table: Tensor
    num_snapshots: int
    buffers: Buffers

    def run(self) -> None:
        buffers, step = self.buffers, self.buffers.step
        shape = (self.num_snapshots + 1, step.num_rows, self.table.shape[1])
        stack = torch.empty(shape, dtype=self.table.dtype, device=self.table.device)
        self.look_up(step.token_ids, stack[0])
        buffers["residual_stack"] = stack
        buffers["prefix"] = stack[0]
        buffers["snapshots"] = stack[:0]

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Fills ``out`` [R, M]."""
        torch.index_select(self.table, 0, ids, out=out)


@dataclass(frozen=True)
class _PartEmbed(_Embed):
    first: int  # token of the table

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        local = ids - self.first
        is_own = (local >= 0) & (local < self.table.shape[0])
        rows = self.table.index_select(0, local.where(is_own, 0)).float()
        out.copy_(exchange_of(self.buffers).reduce(rows.mul_(is_own.unsqueeze(1))))
