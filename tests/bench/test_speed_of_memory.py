"""Roofline, load meter and decode window, on made-up clocks, probes and /proc files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdecode.bench.decode_speed import DecodeRun, Window, decode_window, measure_decode, summary
from kdecode.bench.kernel import ReadProbe
from kdecode.bench.load import LoadMeter, Reading, is_spoilt, others_cores
from kdecode.bench.metrics import MetricError
from kdecode.bench.roofline import (
    Bandwidth,
    measure_roofline,
    render_roofline,
    share_of_floor,
)


class Steps:
    """A probe that says what it is told, in turn."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def bytes_per_second(self) -> float:
        return self.values.pop(0)


class Loads(LoadMeter):
    """A meter that says what it is told, in turn."""

    def __init__(self, *cores: float | None) -> None:
        super().__init__()
        self.cores = list(cores)

    def stop(self) -> float | None:
        return self.cores.pop(0)


def test_thread_counts_take_turns_and_spoilt_rounds_do_not_count() -> None:
    probes = {1: Steps(10e9, 12e9, 2e9), 2: Steps(20e9, 30e9, 22e9)}
    meter = Loads(0.0, 0.0, 0.0, 0.5, 0.9, 0.0)
    one, two = measure_roofline([1, 2], probes.__getitem__, 3, meter)
    assert one == Bandwidth(1, (10e9, 12e9, 2e9), (False, False, True))
    assert two == Bandwidth(2, (20e9, 30e9, 22e9), (False, True, False))
    assert (one.median, two.median) == (11e9, 21e9)
    assert Bandwidth(1, (3e9, 5e9, 4e9), (True, True, True)).median == 4e9
    assert render_roofline([one])[1] == ("1", "11.0", "12.0", "2.0", "1 of 3")


def test_share_of_floor() -> None:
    # 1 GB at 20 GB/s takes 50 ms.
    assert share_of_floor(1e9, 0.1, 20e9) == pytest.approx(0.5)


def test_load_of_others_is_the_machines_less_our_own(tmp_path: Path) -> None:
    begin, end = Reading(10.0, 100.0, 30.0), Reading(12.0, 103.0, 32.0)
    assert others_cores(begin, end) == pytest.approx(0.5)
    assert others_cores(begin, Reading(12.0, 101.0, 32.0)) == 0.0
    assert (is_spoilt(0.11), is_spoilt(0.09), is_spoilt(None)) == (True, False, False)
    unreadable = LoadMeter(tmp_path / "none")
    unreadable.start()
    assert unreadable.stop() is None
    stat = tmp_path / "stat"
    meter = LoadMeter(stat)
    stat.write_text("cpu  100 20 30 9999 9999 1 2 3 77 77\ncpu0 1 1 1 1\n", encoding="ascii")
    meter.start()
    # A million ticks of others' work in less than an hour: more cores than there are is reported.
    stat.write_text("cpu  1000100 20 30 9999 9999 1 2 3 77 77\n", encoding="ascii")
    busy = meter.stop()
    assert busy is not None
    assert busy > 2
    meter.start()
    # Idle, iowait and guest time are nobody's work.
    stat.write_text("cpu  1000100 20 30 1999999 1999999 1 2 3 1997777 77\n", encoding="ascii")
    assert meter.stop() == 0.0


def test_a_run_counts_while_every_request_decodes() -> None:
    late, early = [30, 40, 50, 60], [10, 20, 35, 45]
    # From 30 (the later first token) to 45 (the earlier last one): 40, 35, 45.
    assert decode_window([late, early]) == Window(3, 15e-9)
    assert decode_window([[1_000_000_000, 1_500_000_000]]) == Window(1, 0.5)
    with pytest.raises(MetricError, match="more output tokens"):
        decode_window([[10, 20], [20, 30]])
    with pytest.raises(MetricError, match="more output tokens"):
        decode_window([[10]])


def test_share_of_a_run_is_taken_at_the_probes_around_it() -> None:
    arrivals = [[0, 100_000_000, 200_000_000]]
    calls = iter([arrivals] * 3)
    probe = Steps(10e9, 30e9, 50e9)
    runs = measure_decode(lambda: next(calls), probe, 1, 1e9, 2, Loads(0.0, 0.4))
    # A step takes 100 ms; 1 GB takes 50 ms at 20 GB/s, 25 ms at 40.
    assert [run.probes for run in runs] == [(10e9, 30e9), (30e9, 50e9)]
    assert [run.floor_share for run in runs] == [pytest.approx(0.5), pytest.approx(0.25)]
    assert [run.tokens_per_second for run in runs] == [pytest.approx(10)] * 2
    assert [run.is_spoilt for run in runs] == [False, True]
    assert summary(runs) == (pytest.approx(10), pytest.approx(0.5), 1)
    assert summary(runs[1:]) == (pytest.approx(10), pytest.approx(0.25), 0)


def test_rows_of_a_step_share_its_time() -> None:
    run = DecodeRun(Window(tokens=80, seconds=1.0), 8, 1e9, (20e9, 20e9), None)
    assert run.step_seconds == pytest.approx(0.1)
    assert run.floor_share == pytest.approx(0.5)


def test_the_read_probe_reads_memory() -> None:
    assert 1e8 < ReadProbe(1, 8 << 20).bytes_per_second(2) < 1e13
