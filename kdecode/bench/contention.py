"""What decoding keeps of its speed when another process computes on one of its cores.

Owns the competing process and the protocol: runs with and without it take turns, so that a slow
moment of the machine hits both. Does not know engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from types import TracebackType

from kdecode.bench.decode_speed import Window, decode_window

# Share of the free speed that decoding keeps at least, on two cores or more.
LEAST_SHARE = 0.35
# The scheduler's history of the cores adapts to the competitor before a run is timed.
_SETTLING_S = 0.3

_LOOP = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


class Competitor:
    """A process that keeps one core busy while the context is open."""

    def __init__(self, core: int) -> None:
        self.core = core
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Competitor:
        command = [sys.executable, "-S", "-c", _LOOP, str(self.core)]
        self._process = subprocess.Popen(command)
        time.sleep(_SETTLING_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Pair:
    """Two runs, one after the other: alone, and beside the competitor."""

    free: Window
    shared: Window

    @property
    def share(self) -> float:
        return _speed(self.shared) / _speed(self.free)

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens a second, alone and beside the competitor."""
        return _speed(self.free), _speed(self.shared)


def last_core() -> int:
    """The last core that this process may use."""
    return max(os.sched_getaffinity(0))


def measure_contention(
    generate: Callable[[], Sequence[Sequence[int]]],
    rounds: int,
    compete: Callable[[], AbstractContextManager[object]],
) -> list[Pair]:
    """``rounds`` pairs after a run that is thrown away; every other pair begins with competition.

    generate: runs the requests and returns the arrivals of each one's tokens, in nanoseconds.
    """

    def shared() -> Window:
        with compete():
            return decode_window(generate())

    generate()
    pairs = []
    for number in range(rounds):
        if number % 2:
            beside, free = shared(), decode_window(generate())
        else:
            free, beside = decode_window(generate()), shared()
        pairs.append(Pair(free, beside))
    return pairs


def median_share(pairs: Sequence[Pair]) -> float:
    """Of the pairs' own shares: what both runs of a pair met does not count."""
    return median(pair.share for pair in pairs)


def _speed(window: Window) -> float:
    return window.tokens / window.seconds
