"""experts for a compiler: one operator that it does not look into.

Which experts run is known when the step runs, and MXFP4 has no product in torch. Inside it is the
standard forward's own implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.experts import torch_impl


def refuse(problem: Problem) -> list[str]:
    if problem.ranks.is_alone:
        return []
    return ["A compiled step has no exchanges between ranks."]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed mixture of experts."""
    experts = torch_impl.prepare(problem, weights, buffers)
    width = experts.down[0].rows

    def run(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return experts.summed(x.contiguous(), ids, shares)

    def outline(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], width, dtype=torch.bfloat16)

    return _Experts(experts.input, buffers.operators.define(3, run, outline), buffers)


@dataclass(frozen=True)
class _Experts:
    input: str
    operator: Callable[..., Tensor]
    buffers: Buffers

    def run(self) -> None:
        buffers = self.buffers
        inputs = buffers[self.input], buffers["route_ids"], buffers["route_weights"]
        buffers["expert_sum"] = self.operator(*inputs)
