"""The floor of a decode step: how fast this machine reads memory, now.

Owns the protocol (thread counts take turns, so that a slow moment hits them all) and the shares of
the floor. Does not know how memory is read: a probe is anything with the one member of `Probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from kdecode.bench.load import LoadMeter, is_spoilt


class Probe(Protocol):
    """Reads memory with a fixed number of threads."""

    def bytes_per_second(self) -> float:
        """Of the best of a few passes."""


@dataclass(frozen=True)
class Bandwidth:
    """One thread count over all rounds.

    readings: bytes a second, one a round. spoilt: which of them other processes' load spoilt.
    """

    num_threads: int
    readings: tuple[float, ...]
    spoilt: tuple[bool, ...]

    @property
    def median(self) -> float:
        """Of the rounds that were not spoilt; of all of them if none was left."""
        clean = [r for r, bad in zip(self.readings, self.spoilt, strict=True) if not bad]
        return median(clean or self.readings)


def measure_roofline(
    thread_counts: Sequence[int],
    make_probe: Callable[[int], Probe],
    rounds: int,
    meter: LoadMeter | None = None,
) -> list[Bandwidth]:
    """``rounds`` readings of every thread count, taken in turns."""
    meter = meter or LoadMeter()
    probes = [make_probe(count) for count in thread_counts]
    readings: list[list[float]] = [[] for _ in probes]
    spoilt: list[list[bool]] = [[] for _ in probes]
    for _ in range(rounds):
        for index, probe in enumerate(probes):
            meter.start()
            readings[index].append(probe.bytes_per_second())
            spoilt[index].append(is_spoilt(meter.stop()))
    return [
        Bandwidth(count, tuple(readings[index]), tuple(spoilt[index]))
        for index, count in enumerate(thread_counts)
    ]


def share_of_floor(num_bytes: float, seconds: float, bytes_per_second: float) -> float:
    """The least time that reading the bytes takes, divided by the time that was taken."""
    return num_bytes / bytes_per_second / seconds


def render_roofline(bandwidths: Sequence[Bandwidth]) -> list[tuple[str, ...]]:
    """Rows of a table, the head first."""
    rows = [("threads", "median GB/s", "best", "lowest", "spoilt rounds")]
    for entry in bandwidths:
        values = (entry.median, max(entry.readings), min(entry.readings))
        rows.append(
            (
                str(entry.num_threads),
                *(f"{value / 1e9:.1f}" for value in values),
                f"{sum(entry.spoilt)} of {len(entry.spoilt)}",
            )
        )
    return rows
