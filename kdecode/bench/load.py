"""How much of the machine other processes took while something was measured.

Owns reading /proc: processor time of the whole machine less that of this process. What cannot be
read is None, never 0.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# user, nice, system, irq, softirq, steal: columns of a cpu line of /proc/stat that are not idle.
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)
# Cores' worth of others' work from which on a run is spoilt. /proc counts in ticks of 10 ms.
SPOILT_CORES = 0.1


@dataclass(frozen=True)
class Reading:
    """Seconds so far: of the clock, of all processors' work, of this process's."""

    wall_s: float
    machine_s: float
    own_s: float


class LoadMeter:
    """`start`, then `stop`: the mean number of cores that other processes kept busy between."""

    def __init__(self, proc_stat: Path = Path("/proc/stat")) -> None:
        self._proc_stat = proc_stat
        self._begin: Reading | None = None

    def start(self) -> None:
        self._begin = self._read()

    def stop(self) -> float | None:
        """None where /proc cannot be read."""
        begin, end = self._begin, self._read()
        return None if begin is None or end is None else others_cores(begin, end)

    def _read(self) -> Reading | None:
        try:
            line = self._proc_stat.read_text(encoding="ascii").splitlines()[0].split()
        except OSError:
            return None
        ticks = sum(int(line[column]) for column in _BUSY_COLUMNS)
        # With the child processes that have ended: a peer's program is not somebody else.
        own = sum(os.times()[:4])
        return Reading(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), own)


def others_cores(begin: Reading, end: Reading) -> float:
    """Cores that others kept busy between two readings; never below 0."""
    others = (end.machine_s - begin.machine_s) - (end.own_s - begin.own_s)
    return max(0.0, others / max(end.wall_s - begin.wall_s, 1e-9))


def is_spoilt(cores: float | None) -> bool:
    """Whether others took enough to make a run worthless; False where that is not known."""
    return cores is not None and cores > SPOILT_CORES
