"""What the ranks of one machine take to add up their parts: through shared memory, and over gloo.

Owns the protocol: both exchanges run in the same processes, by turns, on values of the same
numbers, and have to give the same bits. Does not know plans or models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from kdecode.kernels.common.native import Pool, detect_isa
from kdecode.kernels.exchange.native import reduce_step
from kdecode.parallel import launch
from kdecode.parallel.group import Group

# The model width of Kimi K3: one row of it in bf16 is 14 KB, and 16 rows are 230 KB.
WIDTH = 7168
ROWS = (1, 16)
_WARM_UPS = 20


@dataclass(frozen=True)
class Turns:
    """What every rank does: ``rounds`` turns of ``repeats`` exchanges each way."""

    rounds: int
    repeats: int
    num_threads: int = 1


@dataclass(frozen=True)
class ReduceTimes:
    """Of one value: seconds of one exchange, a mean a round."""

    rows: int
    shared: tuple[float, ...]
    gloo: tuple[float, ...]

    @property
    def num_bytes(self) -> int:
        """Of the value that every rank gets."""
        return 2 * self.rows * WIDTH

    @property
    def medians(self) -> tuple[float, float]:
        return median(self.shared), median(self.gloo)

    @property
    def ratio(self) -> float:
        """The median of the rounds' own: what both met does not count."""
        return median(slow / fast for fast, slow in zip(self.shared, self.gloo, strict=True))


def measure_reduce(size: int, turns: Turns) -> list[ReduceTimes]:
    """Of each of `ROWS`, among ``size`` processes of which this is one.

    Raises RuntimeError where the two give other bits, and RankError where a process breaks.
    """
    part_bytes = 4 * max(ROWS) * WIDTH
    threads = turns.num_threads
    group = launch.start(size, _follow, (turns,), num_threads=threads, part_bytes=part_bytes)
    try:
        group.wait_until_ready()
        return _take_turns(group, turns)
    finally:
        group.close()


def _follow(group: Group, turns: Turns) -> None:
    """The life of another process."""
    group.tell_ready()
    _take_turns(group, turns)


def _take_turns(group: Group, turns: Turns) -> list[ReduceTimes]:
    if group.shared is None:
        raise RuntimeError(f"The ranks are on {group.num_hosts} hosts, without memory in common.")
    pool = Pool(turns.num_threads)
    return [_measure(group, pool, rows, turns) for rows in ROWS]


def _measure(group: Group, pool: Pool, rows: int, turns: Turns) -> ReduceTimes:
    """Both ways by turns; every other round begins with the other."""
    generator = torch.Generator().manual_seed(group.ranks.rank)
    part = torch.randn(rows, WIDTH, generator=generator)
    out = torch.empty(rows, WIDTH, dtype=torch.bfloat16)
    step = reduce_step(pool, detect_isa(), group.shared, part, out)
    step.run()
    if not torch.equal(out, group.exchange.reduce(part)):
        raise RuntimeError(f"The two exchanges of {rows} rows give rank {group.ranks.rank} others.")

    def over_gloo() -> None:
        group.exchange.reduce(part)

    ways: dict[str, Callable[[], None]] = {"shared": step.run, "gloo": over_gloo}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        _mean_seconds(run, _WARM_UPS)
    for number in range(turns.rounds):
        for name in sorted(ways, reverse=number % 2 == 0):
            seconds[name].append(_mean_seconds(ways[name], turns.repeats))
    return ReduceTimes(rows, tuple(seconds["shared"]), tuple(seconds["gloo"]))


def _mean_seconds(run: Callable[[], None], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats
