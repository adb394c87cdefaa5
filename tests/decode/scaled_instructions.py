"""Prints which tensor-core instructions kernels with scaled products have in their PTX.

In a process of its own, as `compiled_plans.py` is. Arguments: its cases. Prints one JSON document:
the cases, of each the kernels, of each how often every instruction is there.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import triton
from compiled_plans import plan_of
from triton.backends.compiler import GPUTarget

from kdecode.decode.latency_cuda import launches
from kdecode.kernels.common.triton_compile import CompileJob, compile_job, source_of

_INSTRUCTION = re.compile(
    r"^\s*(?:@%p\d+ )?((?:tcgen05\.mma|mma\.sync|wgmma)[\w.:]*)", re.MULTILINE
)


def found(job: CompileJob) -> dict[str, int]:
    target = GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source_of(job), target=target, options=dict(job.options))
    return dict(Counter(_INSTRUCTION.findall(compiled.asm["ptx"])))


def report(case: str) -> dict[str, dict[str, int]]:
    scaled = [launch for launch in launches(plan_of(case)) if launch.constants.get("IS_SCALED")]
    jobs = dict.fromkeys(compile_job(launch, case.split("/")[0]) for launch in scaled)
    return {job.kernel: found(job) for job in jobs}


if __name__ == "__main__":
    print(json.dumps({case: report(case) for case in sys.argv[1:]}))
