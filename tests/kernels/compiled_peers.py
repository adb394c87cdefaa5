"""Compiles the standard forward's exchanges through symmetric memory, in a process of its own.

In pytest's process Triton may be the interpreter, which has no compiler. Argument: the folder of
kept results. Prints one JSON document: by architecture, of each kernel what a program takes, and as
what a launch that waits, adds and signals is compiled: PTX and machine code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kdecode.kernels.common.peer_table import table_words
from kdecode.kernels.common.triton_compile import (
    SHARED_LIMITS,
    CompileJob,
    compile_all,
    compile_job,
    source_of,
)
from kdecode.kernels.common.triton_launch import Launch
from kdecode.kernels.common.triton_peer_exchange import (
    give_launch,
    hand_on_launch,
    sum_launch,
    take_launch,
)
from kdecode.kernels.contract import PartBlock

NUMBERS = 1 << 20


def launches(size: int) -> list[Launch]:
    def made(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    part, sources = made(4 * NUMBERS, torch.uint8), made(size, torch.int64)
    block = PartBlock(part, sources, None, made(table_words(size), torch.int64))
    counter, words = made(1, torch.int32), made(NUMBERS, torch.int32)
    return [
        give_launch(words, block, counter),
        give_launch(made(NUMBERS, torch.uint8), block, counter),
        take_launch(block, 0, NUMBERS, made(size * NUMBERS, torch.int32), 0, NUMBERS),
        sum_launch(block, 0, made(NUMBERS, torch.bfloat16)),
        hand_on_launch(block, 0, NUMBERS // size, block, counter),
    ]


def report(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for arch in SHARED_LIMITS:
        jobs = [compile_job(launch, arch) for size in (2, 16) for launch in launches(size)]
        compiled = compile_all(jobs, folder, processes=2)
        found[arch] = [vars(compiled[job]) for job in jobs]
    return found


def code() -> dict[str, dict[str, str]]:
    """Of eight ranks."""
    *_, launch = launches(8)
    return {arch: _compiled(compile_job(launch, arch)) for arch in SHARED_LIMITS}


def _compiled(job: CompileJob) -> dict[str, str]:
    target = GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32)
    assembled = triton.compile(source_of(job), target=target, options=dict(job.options)).asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"ptx": assembled["ptx"], "machine": run.stdout}


if __name__ == "__main__":
    print(json.dumps({"taken": report(Path(sys.argv[1])), "code": code()}))
