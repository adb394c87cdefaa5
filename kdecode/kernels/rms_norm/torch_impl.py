"""rms_norm in torch."""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common.norm import rms_norm
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.rms_norm.op import NormWeights


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: NormWeights, buffers: Buffers) -> Prepared:
    return _Norm(weights, problem.config.rms_eps, buffers)


@dataclass(frozen=True)
class _Norm:
    weights: NormWeights
    eps: float
    buffers: Buffers

    def run(self) -> None:
        x = self.buffers[self.weights.input]
        self.buffers[self.weights.output] = rms_norm(x, self.weights.weight, self.eps)
