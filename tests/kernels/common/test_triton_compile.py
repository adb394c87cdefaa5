"""Launches as machine code: specialised as a real launch is, and what a program takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kdecode.kernels.common.triton_compile import SHARED_LIMITS, CompileError, compile_job
from kdecode.kernels.common.triton_launch import Launch


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `compiled_kernels.py` prints, in a process whose Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("compiled_kernels.py"),
            tmp_path_factory.mktemp("kept"),
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_arguments_are_specialised_as_a_launch_does(report: dict[str, Any]) -> None:
    for launched, compiled in report["specialised"]:
        assert compiled == launched
    # Of six variants an offset of 16 bytes and a factor of one change nothing.
    assert len({json.dumps(compiled) for _, compiled in report["specialised"]}) == 4


def test_a_job_is_compiled_once_and_kept(report: dict[str, Any]) -> None:
    assert report["kept"] == len(SHARED_LIMITS)
    assert report["registers"].keys() == SHARED_LIMITS.keys()
    assert all(8 < count <= 255 for count in report["registers"].values())
    # One of the files had been cut short.
    assert report["same_again"]


def test_spilled_registers_and_shared_memory_are_seen(report: dict[str, Any]) -> None:
    spilling, fitting = report["spilling"], report["fitting"]
    assert spilling["stack_bytes"] > 0
    assert fitting["stack_bytes"] == 0
    assert 0 < fitting["shared_bytes"] <= SHARED_LIMITS["sm_90"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("broken", "broken for sm_90: .*power of 2"),
        ("arch", "arch is 'sm_80'; it must be one of sm_90, sm_100, sm_103"),
        ("missing", "square has the parameter out; the launch has not"),
        ("unknown", "square has no parameter N"),
        ("bool", "stride is True; an argument is a tensor or a number"),
        ("dtype", "source is a tensor of torch.complex64, which no kernel reads"),
    ],
)
def test_what_cannot_be_compiled_says_why(report: dict[str, Any], case: str, words: str) -> None:
    assert re.search(words, report[case], re.DOTALL), report[case]


def test_an_interpreted_kernel_is_no_launch_to_a_compiler() -> None:
    with pytest.raises(CompileError, match="imported with TRITON_INTERPRET set"):
        compile_job(Launch(lambda: None, (1,), {"x": torch.empty(1)}, {}), "sm_90")
