"""mlp in torch."""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common.activation import GatedActivation, make_gated
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear
from kdecode.kernels.linear.ranked import make_summed
from kdecode.kernels.mlp.op import MlpWeights


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: MlpWeights, buffers: Buffers) -> Prepared:
    return Mlp(
        gate_up=make_linear(weights.gate_up, buffers.products),
        activation=make_gated(problem.config.activation, weights.gate_up, buffers.products.isa),
        down=make_summed(weights.down, problem, buffers),
        output=weights.output,
        buffers=buffers,
    )


@dataclass(frozen=True)
class Mlp:
    gate_up: Linear
    activation: GatedActivation
    down: Linear
    output: str
    buffers: Buffers

    def run(self) -> None:
        product = self.activation(self.gate_up(self.buffers["mlp_in"]))
        self.buffers[self.output] = self.down(product)
