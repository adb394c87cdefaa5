"""Decode speed of one engine against the floor of the memory that it has to read.

Owns the window in which a run counts as decoding, the probes before and after each run, and which
runs are spoilt. Times are the engine's own. Does not know tensors or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from kdecode.bench.load import LoadMeter, is_spoilt
from kdecode.bench.metrics import MetricError
from kdecode.bench.roofline import Probe, share_of_floor


class NoWindowError(MetricError):
    """A run without a step in which every request decoded."""


@dataclass(frozen=True)
class Window:
    """The part of a run in which every request decodes: tokens that arrived in it, seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class DecodeRun:
    """One run. probes: bytes a second right before and right after it.

    others_cores: cores that other processes kept busy meanwhile; None where that is not known.
    """

    window: Window
    rows: int
    step_bytes: float
    probes: tuple[float, float]
    others_cores: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.window.tokens / self.window.seconds

    @property
    def step_seconds(self) -> float:
        return self.window.seconds * self.rows / self.window.tokens

    @property
    def floor_share(self) -> float:
        """Against the mean of the two probes."""
        bandwidth = sum(self.probes) / 2
        return share_of_floor(self.step_bytes, self.step_seconds, bandwidth)

    @property
    def is_spoilt(self) -> bool:
        return is_spoilt(self.others_cores)


def decode_window(token_ns: Sequence[Sequence[int]]) -> Window:
    """From the moment that every request has its first token until one has its last.

    token_ns: each request's arrivals. NoWindowError if no step lies between: prefill would be all
    that was timed.
    """
    begin = max(times[0] for times in token_ns)
    end = min(times[-1] for times in token_ns)
    tokens = sum(begin < at <= end for times in token_ns for at in times)
    if tokens < len(token_ns) or end <= begin:
        raise NoWindowError(
            f"No step had all {len(token_ns)} requests decoding; ask for more output tokens."
        )
    return Window(tokens, (end - begin) / 1e9)


def measure_decode(
    generate: Callable[[], Sequence[Sequence[int]]],
    probe: Probe,
    rows: int,
    step_bytes: float,
    runs: int,
    meter: LoadMeter | None = None,
) -> list[DecodeRun]:
    """``runs`` runs after one that is thrown away.

    generate: runs the requests and returns the arrivals of each one's tokens. step_bytes: that a
    step of all rows moves.
    """
    meter = meter or LoadMeter()
    generate()
    before = probe.bytes_per_second()
    measured = []
    for _ in range(runs):
        meter.start()
        window = decode_window(generate())
        others = meter.stop()
        after = probe.bytes_per_second()
        measured.append(DecodeRun(window, rows, step_bytes, (before, after), others))
        before = after
    return measured


def summary(runs: Sequence[DecodeRun]) -> tuple[float, float, int]:
    """Median tokens a second, median share of the floor, and how many runs they come from.

    Of the runs that were not spoilt; of all of them, with the count 0, if none was left.
    """
    clean = [run for run in runs if not run.is_spoilt]
    used = clean or list(runs)
    return (
        median(run.tokens_per_second for run in used),
        median(run.floor_share for run in used),
        len(clean),
    )
