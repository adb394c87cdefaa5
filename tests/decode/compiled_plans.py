"""Compiles CUDA plans of Kimi K3, in a process of its own, and prints what their kernels take.

In pytest's process Triton may be the interpreter, which has no compiler. Arguments: the folder of
kept results, then cases as ``ARCH/SIZE/ROWS/ROWS-OF-A-REQUEST``, with ``/ranks`` behind it for the
plan of one of so many ranks, ``/ranks/nccl`` where they exchange values through NCCL, ``/sides``
for one with launches beside its stream, ``/scaled`` for one with scaled products of experts. Prints
one JSON document.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import triton
from released import kimi_k3

from kdecode.config import EngineConfig, ExpertProducts, GpuExchange, GpuKernels, ModelConfig
from kdecode.decode.latency_cuda import launches
from kdecode.decode.launches import LaunchLine, launch_lines, tile_text
from kdecode.decode.plan import DecodePlan
from kdecode.engine.describe import describe_launches
from kdecode.kernels.common.triton_compile import compile_all, compile_job
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
    plans = {case: plan_of(case) for case in cases}
    jobs = {
        case: [compile_job(launch, case.split("/")[0]) for launch in launches(plan)]
        for case, plan in plans.items()
    }
    processes = len(os.sched_getaffinity(0))
    found = compile_all([job for each in jobs.values() for job in each], folder, processes)
    most: dict[tuple[str, ...], dict[str, int]] = {}
    for case, plan in plans.items():
        launched = [line for line in launch_lines(plan) if line.is_launch]
        for line, job in zip(launched, jobs[case], strict=True):
            taken = most.setdefault((case, *_name(line)), {})
            for name, value in vars(found[job]).items():
                taken[name] = max(value, taken.get(name, 0))
    return [
        {"case": key[0], "kernel": key[1], "tile": key[2], **taken} for key, taken in most.items()
    ]


def plan_of(case: str) -> DecodePlan:
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
