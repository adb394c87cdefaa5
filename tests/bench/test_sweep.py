"""Sweeps: a comparison for each point, one table and page, and no figure across points."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from mock_server import CONFIG, MockServer
from simulated import simulate

from kdecode import cli
from kdecode.commands import compare_servers

SPECIALIZED = {**CONFIG, "decode_backend": "latency_specialized"}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the second server is made of; the two are at http://a and http://b."""
    fields: dict[str, Any] = {"config": SPECIALIZED, "chunk_ms": 8.0, "coverage": 1.0}

    def in_simulation(main: Coroutine[Any, Any, Any]) -> Any:
        async def with_servers() -> Any:
            b = MockServer("b", **fields)
            async with MockServer("a").running(80), b.running(80):
                return await main

        return simulate(tmp_path, with_servers())

    monkeypatch.setattr(compare_servers, "run_loop", in_simulation)
    return fields


FLAGS = ["compare", "--url-a", "a", "--url-b", "b", "--blocks", "2", "--no-null"]
FLAGS += ["--output-tokens", "8", "--sweep-concurrency", "1", "4"]


def test_a_comparison_for_each_point(
    servers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, stored = tmp_path / "out", tmp_path / "all.json"
    flags = [*FLAGS, "--sweep-prompt-tokens", "16", "32", "--out", str(out), "--json", str(stored)]
    assert cli.main(flags) == 0
    documents = json.loads(stored.read_text())
    assert len({document["comparison_id"] for document in documents}) == 4
    assert [document["workload"]["requests"] for document in documents] == [3, 8, 3, 8]
    table = capsys.readouterr().out.split("sweep, non-speculative\n")[1].splitlines()
    assert [line.split()[:2] for line in table[1:5]] == [
        *(["1", "16"], ["4", "16"], ["1", "32"], ["4", "32"])
    ]
    assert all("1.250  [1.250, 1.250]" in line for line in table[1:5])
    page = (out / "sweep.html").read_text()
    for heading in ("Throughput against the speed of one user", "Step time by batch"):
        assert heading in page
    assert page.count("<svg") == 3
    assert len(list(out.glob("*/report.html"))) == 4


def test_a_point_without_a_ratio_shows_in_the_exit_code(
    servers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    servers["coverage"] = 0.2
    assert cli.main(FLAGS) == 5
    line = capsys.readouterr().out.split("sweep, non-speculative\n")[1].splitlines()[1]
    assert "not exercised" in line
    assert " none " in line


def test_kinds_of_points_are_told_apart(
    servers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    speculative = {"method": "dspark", "synthetic_acceptance_rates": None}
    servers |= {"config": {**SPECIALIZED, "speculative": speculative}, "acceptance": 2.0}
    assert cli.main(FLAGS) == 3
    assert "sweep, non-speculative | speculative" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--agentic"], ["--rate", "2"], ["--own-times"], ["--task", "mrcr"]]
)
def test_what_a_sweep_cannot_be_of(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FLAGS, *flags]) == 2
    assert "sweep" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_has_an_exit_code_of_its_own(
    servers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = FLAGS[: FLAGS.index("--sweep-concurrency")]
    # Nobody can know before that the disk will be full, or what a folder has inside.
    assert cli.main([*flags, "--json", "/dev/full"]) == 6
    assert "/dev/full cannot be written: [Errno 28]" in capsys.readouterr().err
    (tmp_path / "out" / "report.md").mkdir(parents=True)
    assert cli.main([*flags, "--out", str(tmp_path / "out")]) == 6
    captured = capsys.readouterr()
    assert "the folder" in captured.err.splitlines()[-1]
    assert "verdict: faster" in captured.out
    # What can be known is bad input, and nothing is measured.
    (tmp_path / "file").touch()
    assert cli.main([*flags, "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
