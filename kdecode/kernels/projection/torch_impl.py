"""projection in torch (and native tiles, see `linear/product.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear
from kdecode.kernels.projection.op import ProjectionWeights


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: ProjectionWeights, buffers: Buffers) -> Prepared:
    product = make_linear(weights.matrix, buffers.scratch)
    return _Projection(product, weights.input, weights.output, weights.kept_as, buffers)


@dataclass(frozen=True)
class _Projection:
    product: Linear
    input: str
    output: str
    kept_as: torch.dtype
    buffers: Buffers

    def run(self) -> None:
        self.buffers[self.output] = self.product(self.buffers[self.input]).to(self.kept_as)
