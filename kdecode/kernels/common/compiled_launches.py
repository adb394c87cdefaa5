"""What the launches of a plan take of a GPU, whichever compiler makes their machine code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdecode.kernels.common import triton_compile
from kdecode.kernels.common.cute_launch import CuteLaunch
from kdecode.kernels.common.triton_compile import Resources


def resources_of(
    launches: Sequence[Any], arch: str, folder: Path, processes: int = 1
) -> list[Resources]:
    """Of each launch, in order. folder: where results are kept. processes: for Triton's kernels.

    Raises CompileError with all that one of the compilers cannot compile.
    """
    ours = [launch for launch in launches if isinstance(launch, CuteLaunch)]
    others = [launch for launch in launches if not isinstance(launch, CuteLaunch)]
    jobs = [triton_compile.compile_job(launch, arch) for launch in others]
    taken = triton_compile.compile_all(jobs, folder, processes)
    found = {id(launch): taken[job] for launch, job in zip(others, jobs, strict=True)}
    if ours:
        # Here, because only plans that have such launches need CuTe DSL.
        from kdecode.kernels.common import cute_compile

        cute_jobs = [cute_compile.compile_job(launch, arch) for launch in ours]
        made = cute_compile.compile_all(cute_jobs, folder)
        found |= {id(launch): made[job] for launch, job in zip(ours, cute_jobs, strict=True)}
    return [found[id(launch)] for launch in launches]
