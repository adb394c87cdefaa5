"""Pairs of runs with and without a competing process, and that process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kdecode.bench import contention
from kdecode.bench.contention import Competitor, last_core, measure_contention, median_share
from kdecode.cli import main


def test_runs_take_turns_and_a_pair_is_judged_by_itself() -> None:
    events: list[str] = []
    # Seconds of one token: the run that is thrown away, then two pairs.
    seconds = iter([9.0, 0.1, 0.2, 0.8, 0.2])

    def generate() -> list[list[int]]:
        events.append("run")
        return [[0, round(next(seconds) * 1e9)]]

    @contextmanager
    def compete() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    pairs = measure_contention(generate, 2, compete)
    assert events == ["run", "run", "begin", "run", "end", "begin", "run", "end", "run"]
    assert pairs[0].speeds == pytest.approx((10, 5))
    assert [pair.share for pair in pairs] == pytest.approx([0.5, 0.25])
    assert median_share(pairs) == pytest.approx(0.375)


def test_a_competitor_computes_on_its_core_until_the_context_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contention, "_SETTLING_S", 0.0)
    with Competitor(last_core()) as competitor:
        process = competitor._process
        assert process is not None
        while os.sched_getaffinity(process.pid) != {last_core()}:
            assert process.poll() is None
    assert process.poll() is not None


def test_the_command_prints_pairs_and_the_share_that_is_kept(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contention, "_SETTLING_S", 0.0)
    arguments = ["bench", "contention", str(mini_checkpoint), "--rounds", "2", "--threads", "1"]
    arguments += ["--context-tokens", "4", "--output-tokens", "4"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["pairs"]) == 2
    assert document["share"] > 0
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert f"a process busy on core {last_core()}" in text
    assert "kept; at least 35% is expected" in text
