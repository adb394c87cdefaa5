"""kda_gate in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.common.activation import sigmoid_
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear

_SOFTPLUS_LINEAR_ABOVE = 20.0


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed KDA layer."""
    kda = problem.config.kda
    return _Gate(
        product=make_linear(weights.f_b, buffers.products),
        rank=weights.f_b.cols,
        dt_bias=weights.dt_bias,
        decay_scale=weights.decay_scale.unsqueeze(-1),
        heads=kda.num_heads,
        lower_bound=kda.gate_lower_bound,
        buffers=buffers,
    )


@dataclass(frozen=True)
class _Gate:
    product: Linear
    rank: int
    dt_bias: Tensor  # [D] fp32
    decay_scale: Tensor  # [H, 1] fp32
    heads: int
    lower_bound: float | None
    buffers: Buffers

    def run(self) -> None:
        columns = self.buffers["kda_proj"][:, -(self.rank + self.heads) :]
        f = self.product(columns[:, : self.rank])
        z = (f + self.dt_bias).view(f.shape[0], self.heads, -1)  # [R, H, K] fp32
        if self.lower_bound is not None:
            decay = z.mul_(self.decay_scale).sigmoid_().mul_(self.lower_bound)
        else:
            decay = F.softplus(z, threshold=_SOFTPLUS_LINEAR_ABOVE).mul_(-self.decay_scale)
        self.buffers["kda_decay"] = decay
        self.buffers["kda_beta"] = sigmoid_(columns[:, self.rank :].float())
