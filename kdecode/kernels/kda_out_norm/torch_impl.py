"""kda_out_norm in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed KDA layer."""
    first = weights.conv.shape[1]
    product, width = None, problem.config.kda.width
    if weights.g_b is not None:
        product, width = make_linear(weights.g_b, buffers.products), weights.g_b.cols
    columns = slice(first, first + width)
    return _OutNorm(weights.o_norm, problem.config.rms_eps, columns, product, buffers)


@dataclass(frozen=True)
class _OutNorm:
    weight: Tensor  # [V] fp32
    eps: float
    columns: slice  # of the gate in kda_proj
    product: Linear | None
    buffers: Buffers

    def run(self) -> None:
        gate = self.buffers["kda_proj"][:, self.columns]
        if self.product is not None:
            gate = self.product(gate)
        normed = F.rms_norm(
            self.buffers["kda_out"].float(), self.weight.shape, self.weight, self.eps
        )
        gated = normed.flatten(1).mul_(gate.float().sigmoid_())
        self.buffers["attn_out"] = gated.to(torch.bfloat16)
