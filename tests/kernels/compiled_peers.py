"""Compiles the standard forward's exchanges through symmetric memory, in a process of its own.

In pytest's process Triton may be the interpreter, which has no compiler. Argument: the folder of
kept results. Prints one JSON document: by architecture, of each kernel what a program takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kdecode.kernels.common.peer_table import table_words
from kdecode.kernels.common.triton_compile import SHARED_LIMITS, compile_all, compile_job
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


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]))))
