"""CUDA plans of Kimi K3 with launches beside their stream: which ones, and their machine code.

`tests/plans/sides` has the launches of one rank's share of 8, on one GPU; ``--update-plans`` writes
them. Of the machine code the launches that no other plan has are looked at here.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled_plans import share_plan

from kdecode.commands.plan_device import text_of
from kdecode.config import environment
from kdecode.decode.launches import group_lines, launch_lines
from kdecode.kernels.common.triton_compile import SHARED_LIMITS
from kdecode.kernels.prefetch.op import most_bytes

PLANS = Path(__file__).parents[1] / "plans" / "sides"
UPDATE = "pytest tests/decode/test_side_plans.py --update-plans"
ROWS = (1, 8)
# Beside those of a plan without them: two of the shared experts, and up to four that ask ahead.
MORE_LAUNCHES = {"KDA + dense": 2, "KDA + MoE": 6, "MLA + MoE": 6}
KERNELS = {
    "shared_up dense_up",
    "shared_down projection",
    "moe_gate",
    "moe_join",
    "prefetch_weights",
}
# Why a kernel spills registers, by name; without a reason none may.
SPILLS = {
    "shared_down projection": "8 bytes a thread at 64 rows on sm_100 and sm_103, where programs "
    "share a block, as the same kernel does in plans of several ranks; no other tile was tried."
}


@pytest.mark.parametrize("rows", ROWS)
def test_launches_are_the_committed_ones(request: pytest.FixtureRequest, rows: int) -> None:
    plan = share_plan("sm_103", 8, rows, 1, sides=True)
    text, path = (
        text_of(plan, launch_lines(plan), "sm_103", 1) + "\n",
        PLANS / f"kimi-k3.{rows}.txt",
    )
    if request.config.getoption("--update-plans"):
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "now")
    assert text == committed, "\n".join([*lines, f"If it is meant: {UPDATE}"])


@pytest.mark.parametrize("rows", [1, 64])
def test_launches_that_a_layer_has_more(rows: int) -> None:
    counts = []
    for sides in (False, True):
        plan = share_plan("sm_103", 8, rows, 1, sides=sides)
        groups = group_lines(plan.config, launch_lines(plan))
        counts.append({group.name: len(group.columns) for group in groups if group.layers})
    plain, ours = counts
    assert {name: ours[name] - plain[name] for name in plain} == MORE_LAUNCHES


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_a_launch_asks_for_no_more_than_there_is_room_for(arch: str) -> None:
    plan = share_plan(arch, 8, 1, 1, sides=True)
    (note,) = (note for note in plan.notes if "ask for" in note)
    count = sum(step.op == "prefetch" for step in plan.steps)
    assert note.startswith(f"{count} launches ask for ")
    assert note.endswith(f"each for at most {most_bytes(arch):,}")
    total = int(note.split(" ask for ")[1].split()[0].replace(",", ""))
    assert 0 < total <= count * most_bytes(arch)


def test_their_kernels_compile_and_do_not_spill() -> None:
    _check(_compile("sm_103/16/1/1/sides", "sm_103/16/8/8/sides"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_they_compile_for_every_architecture(arch: str) -> None:
    sizes = ((8, 1, 1), (16, 1, 1), (8, 4, 1), (8, 8, 8), (8, 64, 1))
    _check(_compile(*(f"{arch}/{size}/{rows}/{each}/sides" for size, rows, each in sizes)))


def _compile(*cases: str) -> list[dict[str, Any]]:
    """What `compiled_plans.py` prints; its results are kept in kdecode's cache folder."""
    tests = Path(__file__).parents[1]
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = str(tests / "model")
    folder = environment().cache_dir / "compiled"
    command = [sys.executable, tests / "decode" / "compiled_plans.py", folder, *cases]
    run = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert run.returncode == 0, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout)["lines"]
    return [line for line in found if line["kernel"] in KERNELS]


def _check(lines: list[dict[str, Any]]) -> None:
    assert {line["kernel"] for line in lines} == KERNELS
    for line in lines:
        assert line["shared_bytes"] <= SHARED_LIMITS[line["case"].split("/")[0]], line
        assert line["stack_bytes"] == 0 or line["kernel"] in SPILLS, line
