"""latent_up in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kdecode.kernels.common.norm import rms_norm
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear


def refuse(problem: Problem) -> list[str]:
    if problem.ranks.is_alone:
        return []
    return ["Of several ranks the way up from the latents is a part of the step of the experts."]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed mixture of experts."""
    product = make_linear(weights.latent_up, buffers.products)
    return _LatentUp(weights.latent_norm, problem.config.rms_eps, product, buffers)


@dataclass(frozen=True)
class _LatentUp:
    norm: Tensor | None  # [L] fp32
    eps: float
    product: Linear
    buffers: Buffers

    def run(self) -> None:
        x = self.buffers["expert_sum"]
        if self.norm is not None:
            x = rms_norm(x, self.norm, self.eps)
        self.buffers["routed"] = self.product(x)
