"""Compiles CUDA plans of Kimi K3, in a process of its own, and prints what their kernels take.

In pytest's process Triton may be the interpreter, which has no compiler. Arguments: the folder of
kept results, then cases as ``ARCH/SIZE/ROWS/ROWS-OF-A-REQUEST``, with ``/ranks`` behind it for the
plan of one of so many ranks, ``/ranks/nccl`` where they exchange values through NCCL, ``/sides``
for one with launches beside its stream, ``/scaled`` for the kernels of a plan that have scaled
products of experts. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import triton
from released import kimi_k3
from triton.backends.compiler import GPUTarget

from kdecode.config import EngineConfig, ExpertProducts, GpuExchange, GpuKernels, ModelConfig
from kdecode.decode.latency_cuda import launches
from kdecode.decode.launches import LaunchLine, launch_lines, tile_text
from kdecode.decode.plan import DecodePlan
from kdecode.engine.describe import describe_launches
from kdecode.kernels.common.triton_compile import (
    CompileJob,
    compile_all,
    compile_job,
    source_of,
)
from kdecode.model.rank_share import share_of
from kdecode.parallel.ranks import ALONE, Ranks


@cache
def share_plan(
    arch: str,
    size: int,
    rows: int,
    each: int,
    gpu_kernels: GpuKernels = "triton",
    *,
    exchanges: bool = False,
    sides: bool = False,
    gpu_exchange: GpuExchange = "auto",
    expert_products: ExpertProducts = "exact",
) -> DecodePlan:
    """The plan of one rank's share of the whole model; exchanges: with those of the ranks, by
    gpu_exchange; sides: with all that can run beside a plan's stream."""
    ranks = Ranks(0, size) if exchanges else ALONE
    engine = EngineConfig(
        device="cuda",
        decode_backend="latency_specialized",
        max_context_tokens=131_072,
        gpu_kernels=gpu_kernels,
        tensor_parallel_size=ranks.size,
        gpu_exchange=gpu_exchange,
        shared_experts="stream" if sides else "inside",
        weight_prefetch="l2" if sides else "off",
        expert_products=expert_products,
    )
    config = share_of(ModelConfig.from_checkpoint(kimi_k3()), size)
    return describe_launches(config, engine, arch, rows, each, ranks)


def report(folder: Path, cases: list[str]) -> list[dict[str, Any]]:
    """A line a case and kernel with one tile: the most that any of its launches takes."""
    launched = {case: _launched(case) for case in cases}
    jobs = [job for each in launched.values() for _, job in each]
    found = compile_all(jobs, folder, len(os.sched_getaffinity(0)))
    most: dict[tuple[str, ...], dict[str, int]] = {}
    for case, each in launched.items():
        for line, job in each:
            taken = most.setdefault((case, *_name(line)), {})
            for name, value in vars(found[job]).items():
                taken[name] = max(value, taken.get(name, 0))
    return [
        {"case": key[0], "kernel": key[1], "tile": key[2], **taken} for key, taken in most.items()
    ]


def _launched(case: str) -> list[tuple[LaunchLine, CompileJob]]:
    plan, arch = _plan_of(case), case.split("/")[0]
    lines = [line for line in launch_lines(plan) if line.is_launch]
    return [
        (line, compile_job(launch, arch))
        for line, launch in zip(lines, launches(plan), strict=True)
        if not case.endswith("/scaled") or launch.constants.get("IS_SCALED")
    ]


def instructions(cases: list[str], pattern: re.Pattern[str]) -> dict[str, dict[str, int]]:
    """How often what a pattern finds is in the PTX of each kernel of the cases."""
    found = {}
    for job in dict.fromkeys(job for case in cases for _, job in _launched(case)):
        target = GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32)
        compiled = triton.compile(source_of(job), target=target, options=dict(job.options))
        counts = Counter(pattern.findall(compiled.asm["ptx"]))
        found[f"{job.arch} {job.kernel} {dict(job.constants)}"] = dict(counts)
    return found


def _plan_of(case: str) -> DecodePlan:
    arch, size, rows, each, *form = case.split("/")
    sizes = int(size), int(rows), int(each)
    return share_plan(
        arch,
        *sizes,
        exchanges="ranks" in form,
        sides="sides" in form,
        gpu_exchange="nccl" if "nccl" in form else "auto",
        expert_products="scaled" if "scaled" in form else "exact",
    )


def _name(line: LaunchLine) -> tuple[str, str]:
    tile = {**line.tile, "warps": line.warps, "stages": line.stages}
    return f"{line.op} {line.kernel}".replace(f"{line.op} {line.op}", line.op), tile_text(tile)


if __name__ == "__main__":
    lines = report(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps({"triton": triton.__version__, "lines": lines}))
