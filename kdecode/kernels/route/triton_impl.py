"""route with the choice in Triton: one product of torch, one launch of a program a row.

Of several ranks each has some experts' logits, and all choose among all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.config import MoeConfig
from kdecode.kernels.common.triton_route import refuse_choice, route_launch
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.rank_mixture import Gate, make_gate


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_choice(problem.config.moe)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed mixture of experts."""
    gate = make_gate(weights, problem, buffers)
    return _Route(gate, weights.router_bias, problem.config.moe, buffers)


@dataclass(frozen=True)
class _Route:
    gate: Gate
    bias: Tensor  # [E] fp32
    moe: MoeConfig
    buffers: Buffers

    def run(self) -> None:
        logits = self.gate.run()
        slots = (logits.shape[0], self.moe.top_k)
        ids = logits.new_empty(slots, dtype=torch.int32)
        weights = logits.new_empty(slots)
        if logits.shape[0]:
            route_launch(self.moe, logits, self.bias, ids, weights).run()
        self.buffers["route_ids"], self.buffers["route_weights"] = ids, weights
