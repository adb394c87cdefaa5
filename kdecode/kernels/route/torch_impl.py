"""route in torch. Of several ranks each has some experts' logits, and all choose among all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.config import MoeConfig
from kdecode.kernels.common.activation import sigmoid_
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.rank_mixture import Gate, make_gate

_EPS = 1e-20


def refuse(problem: Problem) -> list[str]:
    return []


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
        scores = sigmoid_(self.gate.run())  # [R, E]
        # topk leaves the order of equal scores open; a stable sort does not.
        order = torch.sort(scores + self.bias, dim=-1, descending=True, stable=True).indices
        ids = order[:, : self.moe.top_k]
        weights = scores.gather(-1, ids)
        if self.moe.is_renormalized:
            weights /= weights.sum(-1, keepdim=True) + _EPS
        self.buffers["route_ids"] = ids.to(torch.int32)
        self.buffers["route_weights"] = weights.mul_(self.moe.routed_scaling)
