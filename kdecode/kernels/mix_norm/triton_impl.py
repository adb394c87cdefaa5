"""mix_norm in Triton: a program scores one snapshot of a row; a row's last one mixes and norms."""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.common.triton_join import plan_rows, refuse_plan_rows
from kdecode.kernels.common.triton_launch import Launch, TritonStep
from kdecode.kernels.common.triton_mix import mix_arguments, mix_norm_row, score_snapshot
from kdecode.kernels.common.triton_ops import is_last_arrival
from kdecode.kernels.contract import Buffers, Problem

_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: MixNorm, buffers: Buffers) -> TritonStep:
    rows = plan_rows(problem)
    arguments, constants = mix_arguments(problem.config, rows, weights, buffers)
    arguments |= {"counters": buffers.counters(rows), "rows": rows}
    programs = rows * max(1, weights.num_snapshots)
    return TritonStep(Launch(mix_norm, (programs,), arguments, constants, num_warps=_WARPS))


@triton.jit(do_not_specialize=["rows"])
def mix_norm(
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    scores,
    mix_out,
    norm_out,
    counters,
    eps,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    MAX_SNAPSHOTS: tl.constexpr,
):
    row = tl.program_id(0) % rows
    is_last = True
    if SNAPSHOTS > 0:
        score_snapshot(
            row,
            tl.program_id(0) // rows,
            rows,
            snapshots,
            mix_weight,
            scores,
            eps,
            WIDTH,
            BLOCK_WIDTH,
            MAX_SNAPSHOTS,
        )
        is_last = is_last_arrival(counters + row, SNAPSHOTS)
    if is_last:
        mix_norm_row(
            row,
            rows,
            prefix,
            snapshots,
            mix_weight,
            norm_weight,
            scores,
            mix_out,
            norm_out,
            eps,
            WIDTH,
            BLOCK_WIDTH,
            SNAPSHOTS,
            MAX_SNAPSHOTS,
        )
