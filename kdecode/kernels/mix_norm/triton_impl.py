"""mix_norm in Triton, a program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.common.triton_launch import Launch, TritonStep, plan_rows, refuse_plan_rows
from kdecode.kernels.common.triton_mix import mix_arguments, mix_norm_row
from kdecode.kernels.contract import Buffers, Problem

_WARPS = 16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: MixNorm, buffers: Buffers) -> TritonStep:
    rows = plan_rows(problem)
    arguments, constants = mix_arguments(problem.config, rows, weights, buffers)
    arguments["rows"] = rows
    constants["IS_PUSHED"] = weights.is_pushed
    launch = Launch(mix_norm, (rows,), arguments, constants, _WARPS, begins_early=True)
    return TritonStep(launch)


@triton.jit(do_not_specialize=["rows"])
def mix_norm(
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_PUSHED: tl.constexpr,
):
    mix_norm_row(
        tl.program_id(0),
        rows,
        prefix,
        snapshots,
        mix_weight,
        norm_weight,
        mix_out,
        norm_out,
        eps,
        WIDTH,
        BLOCK_WIDTH,
        SNAPSHOTS,
        BLOCK_S,
        IS_PUSHED,
    )
