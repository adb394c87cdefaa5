"""What `--plan` says against what a comparison then does, and what `--explain` reads out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mock_server import MockServer
from simulated import simulate
from test_serving_protocol import MACHINE, WORKLOAD, auto, design, measure, special

from kdecode import cli
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.explain import explain
from kdecode.bench.serving.http import Target
from kdecode.bench.serving.load import Load, run_pass
from kdecode.bench.serving.plan import Expected, pass_seconds, phases, plan_lines
from kdecode.bench.serving.stored import StoredError, document_of
from kdecode.bench.statistics import estimate_ratio, expected_detectable
from kdecode.bench.workloads.synthetic import AgentShape, TokenRange, agentic, fixed

# What `auto` of the scripted servers takes.
EXPECTED = Expected(0.2, 0.013)
URLS = ["compare", "--url-a", "http://a", "--url-b", "http://b"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"has_null": True}, {"blocks": 3, "order": "random"}, {"load": Load(concurrency=2)}],
)
def test_a_plan_has_the_requests_of_the_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    a, b = auto(), special()
    found = measure(tmp_path, a, b, **changes)
    planned = phases(WORKLOAD, design(**changes), EXPECTED)
    for arm, server in enumerate((a, b)):
        least, most = (
            sum(phase.passes[arm][side] * phase.requests for phase in planned) for side in (0, 1)
        )
        assert least <= len(server.log) <= most
        # Warm-up alone is longer or shorter.
        assert least == len(server.log)
    assert found.verdict == "faster"


@pytest.mark.parametrize(
    "load",
    [Load(concurrency=1), Load(concurrency=3), Load(rate=2.0, seed=1), Load(speed=2.0)],
    ids=str,
)
def test_a_pass_takes_as_long_as_planned(tmp_path: Path, load: Load) -> None:
    """One server that does not slow down, and pauses between turns."""
    shape = AgentShape(sessions=4, turns=3, output_tokens=(2, 9))
    workload = agentic(shape, TokenRange(0, 100), seed=3)
    server = MockServer("auto", chunk_ms=13.0, prefill_ms=200.0)

    async def main() -> float:
        async with server.running() as url:
            found = await run_pass(Client("a", Target.from_url(url)), workload, load)
            return (found.end_ns - found.begin_ns) / 1e9

    assert simulate(tmp_path, main()) == pytest.approx(
        pass_seconds(workload, load, EXPECTED), rel=1e-6
    )


def test_the_effect_that_is_told_is_seen_in_most_runs() -> None:
    import math

    import numpy as np

    spread, blocks = 0.02, 6
    effect = math.log(expected_detectable(spread, blocks))
    draws = np.random.default_rng(5).normal(effect, spread, (300, blocks))
    seen = [estimate_ratio([[(math.exp(v), 1.0)] for v in row], 0, 500).low > 1 for row in draws]
    assert 0.72 <= np.mean(seen) <= 0.92


def test_a_plan_says_what_it_does_not_know() -> None:
    workload = fixed(2, 4, 5, TokenRange(0, 9), 0)
    lines = plan_lines([("a", "x"), ("b", "y")], workload, design(), None)
    (time,) = [line for line in lines if line.startswith("time:")]
    assert "alone take 0.0 s; with --expect-ttft-ms" in time
    assert "8 in, up to 10 out" in "\n".join(lines)


def test_a_plan_asks_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*URLS, "--plan", "--order", "random", "--blocks", "4", "--no-null"]) == 0
    out = capsys.readouterr().out
    assert "null run" not in out
    assert "24 in 4 blocks" in out
    # As the run would shuffle them.
    (order,) = [line for line in out.splitlines() if line.startswith("order")]
    assert sorted(order.split(": ")[1].split(", ")[0]) == list("aabb")
    sweep = ["--sweep-concurrency", "1", "2", "--sweep-prompt-tokens", "8", "16"]
    assert cli.main([*URLS, "--plan", *sweep]) == 0
    assert "comparison 4 of 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan", "--json", "x"], "--plan measures nothing"),
        (["--plan", "--preflight"], "name one of them"),
        (["--plan", "--expect-ttft-ms", "5"], "are given together"),
        (["--plan", "--expect-ttft-ms", "5", "--expect-tpot-ms", "nan"], "tpot-ms is nan"),
        (["--plan", "--workload", "/no/such/file"], "no/such/file"),
    ],
)
def test_plans_that_cannot_be_made(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*URLS, *flags]) == 2
    assert message in capsys.readouterr().err


def test_every_name_of_a_comparison_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(json.dumps(document_of(measure(tmp_path, auto(), special()), MACHINE)))
    for name, formula in document["formulas"].items():
        assert explain(document, name)[0] == f"{name} = {formula}"
    tpot = "\n".join(explain(document, "tpot"))
    assert "a: P50 13.000 ms, P90 13.000 ms of 8 values; 8 of 8 requests in 4 passes" in tpot
    assert "ratio a / b: 1.300" in tpot
    assert "tokens counted by usage per chunk" in tpot
    assert "b: 100.0 %" in "\n".join(explain(document, "coverage"))
    assert "not told by the server" in "\n".join(explain(document, "derived_tpot"))
    with pytest.raises(StoredError, match="'speed' is no quantity"):
        explain(document, "speed")
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(document))
    assert cli.main(["compare", "--explain", str(path), "e2e"]) == 0
    assert "ratio a / b" in capsys.readouterr().out
    assert cli.main(["compare", "--explain", str(tmp_path / "none"), "e2e"]) == 2


def test_a_refused_comparison_explains_why_it_has_no_ratio(tmp_path: Path) -> None:
    document = document_of(measure(tmp_path, auto(), special(coverage=0.1)), MACHINE)
    assert explain(document, "tpot")[-1] == "no ratio: the verdict is 'not exercised'"
