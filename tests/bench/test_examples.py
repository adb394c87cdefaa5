"""The examples of docs/evaluate.md, run: every block is typed and every line has to be printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from mock_server import CONFIG, HARDWARE, MockServer
from simulated import simulate

from kdecode import cli
from kdecode.commands import compare_servers

DOCS = Path(__file__).parents[2] / "docs" / "evaluate.md"
PORT = 80
SPECIALIZED = {**CONFIG, "decode_backend": "latency_specialized"}


def drafts(config: Any, rates: list[float] | None = None) -> dict[str, Any]:
    speculative = {"method": "dspark", "synthetic_acceptance_rates": rates}
    return {**config, "speculative": speculative, "outputs_valid": rates is None}


def servers() -> list[MockServer]:
    """Those that the page names; new ones, because they count."""
    chunk = {"tokens_per_chunk": 8}
    slow: dict[str, Any] = {"chunk_ms": 8 * 13.0, **chunk}
    fast: dict[str, Any] = {"config": SPECIALIZED, "chunk_ms": 8 * 10.0, "coverage": 1.0, **chunk}
    made_up = [1.0, 1.0]
    return [
        MockServer("auto", **slow),
        MockServer("specialized", **fast),
        MockServer("fp8-cache", **{**fast, "config": {**SPECIALIZED, "cache": {"dtype": "fp8"}}}),
        MockServer("sixteen-devices", hardware={**HARDWARE, "count": 16}, **fast),
        MockServer("synthetic-auto", config=drafts(CONFIG, made_up), acceptance=3.0, **slow),
        *(
            MockServer(name, **{**fast, "config": drafts(SPECIALIZED, made_up)}, acceptance=found)
            for name, found in (("synthetic-specialized", 3.0), ("synthetic-missed", 5.0))
        ),
        MockServer("speculative", **{**fast, "config": drafts(SPECIALIZED)}, acceptance=2.0),
        MockServer("mostly-standard", **{**fast, "coverage": 0.4}),
        MockServer("other-words", **fast, words={7: "other "}, margins={7: ("t7 ", 3.0)}),
        MockServer("loses-some", **fast, fail_every=14),
        MockServer("warm-cache", **fast, cached_tokens=64),
        MockServer("silent", config=None, **chunk),
        MockServer("biased", bias=1.05, **slow),
    ]


def examples() -> list[str]:
    return re.findall(r"^```console\n(.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)


def _matches(line: str, printed: str) -> bool:
    begin, dots, _ = line.partition("...")
    return printed.startswith(begin.rstrip()) if dots else printed.rstrip() == line


@pytest.mark.parametrize("example", examples(), ids=lambda text: text.splitlines()[0][2:60])
def test_example(
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def in_simulation(main: Coroutine[Any, Any, Any]) -> Any:
        async def with_servers() -> Any:
            async with AsyncExitStack() as stack:
                for server in servers():
                    await stack.enter_async_context(server.running(PORT))
                return await main

        return simulate(tmp_path, with_servers())

    monkeypatch.setattr(compare_servers, "run_loop", in_simulation)
    monkeypatch.chdir(tmp_path)
    code, printed = None, iter(())
    for line in example.splitlines():
        if line == "$ echo $?":
            printed = iter([str(code)])
        elif line.startswith("$ kdecode "):
            code = cli.main(shlex.split(line)[2:])
            printed = iter(capsys.readouterr().out.splitlines())
        else:
            # In this order; what is between them is left out of the page.
            assert any(_matches(line, one) for one in printed), f"{line!r} is not printed"


def test_the_page_has_all_of_them() -> None:
    assert len(examples()) == 17
