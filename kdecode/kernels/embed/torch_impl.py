"""embed in torch: the step's token ids were checked when its metadata was derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels.contract import Buffers, Prepared, Problem


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed model."""
    return _Embed(weights.embed, problem.config.num_snapshots, buffers)


@dataclass(frozen=True)
class _Embed:
    table: Tensor
    num_snapshots: int
    buffers: Buffers

    def run(self) -> None:
        buffers, step = self.buffers, self.buffers.step
        shape = (self.num_snapshots + 1, step.num_rows, self.table.shape[1])
        stack = torch.empty(shape, dtype=self.table.dtype, device=self.table.device)
        torch.index_select(self.table, 0, step.token_ids, out=stack[0])
        buffers["residual_stack"] = stack
        buffers["prefix"] = stack[0]
        buffers["snapshots"] = stack[:0]
