"""Times of the two exchanges: the arithmetic, and a run of the command with real processes."""

from __future__ import annotations

import json

import pytest

from kdecode.bench.collectives import WIDTH, ReduceTimes
from kdecode.cli import main


def test_a_round_is_judged_by_itself() -> None:
    # The second round met something that slowed both.
    times = ReduceTimes(16, shared=(1.0, 10.0, 1.0), gloo=(4.0, 50.0, 3.0))
    assert times.num_bytes == 229_376
    assert times.medians == (1.0, 4.0)
    assert times.ratio == 4.0


def test_the_command_measures_both_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--rounds", "3", "--repeats", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensor_parallel_size"] == 2
    assert [entry["bytes"] for entry in document["reduce"]] == [2 * WIDTH, 32 * WIDTH]
    for entry in document["reduce"]:
        assert len(entry["shared"]) == len(entry["gloo"]) == 3
        assert min(entry["shared"] + entry["gloo"]) > 0
        assert entry["ratio"] > 0
    assert document["machine"]["cores"] >= 1


def test_one_rank_has_nothing_to_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "-tp", "1"]) != 0
    assert "nothing to exchange below 2" in capsys.readouterr().err
