"""The machine code of the standard path's experts and route, made without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_LIMIT = 227 << 10


def compiled(folder: Path, *archs: str) -> list[dict[str, Any]]:
    tests = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compiled_tiles.py")), str(folder), *archs],
        env=environment | {"PYTHONPATH": str(tests / "model")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines: list[dict[str, Any]] = json.loads(run.stdout)
    return lines


def check(lines: list[dict[str, Any]], archs: int) -> None:
    names = sorted((line["kernel"].rpartition(".")[2], line["pairs"]) for line in lines)
    # What is not rounded is another kernel.
    down, up = ["expert_down_tiles"] * 2, ["expert_up_tiles"]
    tiled = [(kernel, pairs) for kernel in (*down, *up) for pairs in (16, 128)]
    # Sums and the route are the same kernel for any number of rows.
    sums = [("expert_sums", 0), ("sum_ranks", 0)] * 2
    expected = sorted([*tiled, *sums, ("route_rows", 0)] * archs)
    assert names == expected
    for line in lines:
        assert line["stack_bytes"] == 0, line
        assert line["shared_bytes"] <= SHARED_LIMIT, line


def test_kernels_compile_and_do_not_spill(tmp_path: Path) -> None:
    check(compiled(tmp_path, "sm_90"), 1)


@pytest.mark.slow
def test_on_every_architecture(tmp_path: Path) -> None:
    check(compiled(tmp_path, "sm_100", "sm_103"), 2)
