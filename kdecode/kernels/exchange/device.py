"""exchange of a CUDA plan: what moves a block between GPUs was given with the plan's buffers."""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.contract import Buffers, PartBlock, Problem
from kdecode.kernels.exchange.op import ExchangeUse


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return [] if not problem.ranks.is_alone else ["A rank that is alone exchanges nothing."]


def prepare(problem: Problem, weights: ExchangeUse, buffers: Buffers) -> ExchangeStep:
    return ExchangeStep(buffers.blocks[weights.place])


@dataclass(frozen=True)
class ExchangeStep:
    """A prepared exchange. It has no launch of ours for a compiler."""

    block: PartBlock
    launches: tuple[object, ...] = ()

    def run(self) -> None:
        assert self.block.run is not None, "ranks that signal each other have no such step"
        self.block.run()
