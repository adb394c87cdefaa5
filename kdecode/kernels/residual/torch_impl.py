"""residual in torch."""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.residual.op import ResidualUse


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: ResidualUse, buffers: Buffers) -> Prepared:
    return _Residual(weights, buffers)


@dataclass(frozen=True)
class _Residual:
    use: ResidualUse
    buffers: Buffers

    def run(self) -> None:
        buffers, use = self.buffers, self.use
        delta = buffers[use.delta]
        if use.shared is not None:
            delta = delta + buffers[use.shared]
            buffers["mlp_delta"] = delta
        if not use.is_push:
            buffers["prefix"].add_(delta)
            return
        stack, count = buffers["residual_stack"], use.num_snapshots + 1
        stack[count].copy_(delta)
        buffers["snapshots"] = stack[:count]
        buffers["prefix"] = stack[count]
