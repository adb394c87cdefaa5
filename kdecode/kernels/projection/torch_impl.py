"""projection in torch (and native tiles, see `linear/product.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear
from kdecode.kernels.linear.ranked import make_gathered, make_summed
from kdecode.kernels.projection.op import ProjectionWeights


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: ProjectionWeights, buffers: Buffers) -> Prepared:
    if weights.exchange is None:
        product = make_linear(weights.matrix, buffers.products)
    else:
        make = make_summed if weights.exchange == "reduce" else make_gathered
        product = make(weights.matrix, problem, buffers)
    kind = _Head if weights.is_head else _Projection
    return kind(product, weights.input, weights.output, buffers)


@dataclass(frozen=True)
class _Projection:
    product: Linear
    input: str
    output: str
    buffers: Buffers

    def run(self) -> None:
        self.buffers[self.output] = self.product(self.buffers[self.input])


@dataclass(frozen=True)
class _Head(_Projection):
    def run(self) -> None:
        x, step = self.buffers[self.input], self.buffers.step
        if step.num_logits < step.num_rows:
            x = x[step.logits_rows]
        self.buffers[self.output] = self.product(x).float()
