"""How two servers are compared, and what a run leaves behind: the types of a comparison.

Owns the design, the order of the passes and which of them are pairs. Runs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kdecode.bench.agreement import Agreement
from kdecode.bench.serving.forced import Calibration, ForcedChoices
from kdecode.bench.serving.load import Load, PassResult
from kdecode.bench.serving.outputs import Judged
from kdecode.bench.serving.summary import Limits
from kdecode.bench.verdicts import Pairs

# How the caches of both arms are brought into one state: requests of every pass are salted, so that
# they find nothing of an earlier one; or the server drops its prefixes before a pass; or neither.
CacheState = Literal["salt", "reset", "as is"]

# Servers that the comparison starts: both for all of it; both anew for each block; one at a time,
# anew whenever the other arm's turn begins, so that one set of devices is enough.
Restart = Literal["never", "block", "arm"]


@dataclass(frozen=True)
class Design:
    """A block is four passes of the workload: ABBA, the next time BAAB, or in a random order.

    has_null: the first arm is measured against itself before. near_tie: of outputs, in natural
    logarithms; None: as the first arm's own roundings say. warmup_passes: least and most discarded
    passes of an arm, with other contents.
    """

    load: Load
    blocks: int = 6
    has_null: bool = True
    order: Literal["abba", "random"] = "abba"
    cache: CacheState = "salt"
    restart: Restart = "never"
    warmup_passes: tuple[int, int] = (3, 10)
    warmup_tolerance: float = 0.05
    warmup_requests: int = 4
    near_tie: float | None = 0.5
    limits: Limits = field(default_factory=Limits)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 2:
            raise ValueError(f"blocks is {self.blocks}; an interval needs at least 2.")


@dataclass(frozen=True)
class MeasuredPass:
    """One pass that counts. arm: 0 or 1. The i-th pass of each arm in a block are pairs."""

    block: int
    pair: int
    arm: int
    result: PassResult


@dataclass(frozen=True)
class Outputs:
    """judged: the greedy replies, with the near-tie that they were judged by. calibration, forced:
    of the prompts' paths, which decide nothing; None where a server does not tell."""

    judged: Judged
    near_tie: float
    calibration: Calibration | None
    forced: ForcedChoices | None

    @property
    def agreement(self) -> Agreement:
        return self.judged.agreement


def block_orders(design: Design) -> list[list[int]]:
    """The arms of each block's passes, in their order."""
    shuffler, found = random.Random(design.seed), []
    for block in range(design.blocks):
        order = [0, 1, 1, 0] if block % 2 == 0 else [1, 0, 0, 1]
        if design.order == "random":
            shuffler.shuffle(order)
        found.append(order)
    return found


def pairs_of(passes: Sequence[MeasuredPass]) -> Pairs:
    """Both arms' metrics of the same request in the same pair of passes, block by block."""
    halves: dict[tuple[int, int, str], dict[int, Any]] = {}
    for one in passes:
        for record in one.result.records:
            metrics = record.metrics()
            if metrics is not None:
                key = (one.block, one.pair, record.request_id)
                halves.setdefault(key, {})[one.arm] = metrics
    blocks: dict[int, list[Any]] = {one.block: [] for one in passes}
    for (block, _, _), half in sorted(halves.items()):
        if len(half) == 2:
            blocks[block].append((half[0], half[1]))
    return [blocks[block] for block in sorted(blocks)]
