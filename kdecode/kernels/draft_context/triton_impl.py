"""draft_context in Triton: norms of the taps, the product, its norm; a launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    plan_rows,
    refuse_plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import to_bf16, wait_for_previous
from kdecode.kernels.common.triton_projection import projection_launch
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32 = torch.bfloat16, torch.float32

_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `DraftPlanWeights` with matrices in "rows"."""
    rows, width, eps = plan_rows(problem), problem.config.hidden_size, problem.config.rms_eps
    count = buffers["taps"].shape[1]
    taps = tensor_for(buffers["taps"], BF16, (rows, count, width), name="taps").flatten(1)
    projected = buffers.scratch("draft_projected", (rows, width))
    launches = []
    if weights.tap_norms is not None:
        norms = tensor_for(weights.tap_norms, FP32, (count, width), name="tap_norms")
        normed = buffers.scratch("draft_normed", (rows, count * width))
        launches.append(_norm(rows * count, count, taps, norms, normed, eps))
        taps = normed
    matrix = row_major(weights.context_proj, (width, count * width), "context_proj")
    launches.append(projection_launch(problem, taps, matrix, projected, buffers))
    norm = tensor_for(weights.context_norm, FP32, (width,), name="context_norm")
    context = tensor_for(buffers["context"], BF16, (rows, width), name="context")
    launches.append(_norm(rows, 1, projected, norm, context, eps))
    return TritonStep(launches[0], (weights,), tuple(launches[1:]))


def _norm(count: int, parts: int, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> Launch:
    """RMSNorm of ``count`` rows of the model width, ``parts`` after each other by other weights."""
    width = x.numel() // count
    arguments = {"x": x, "weight": weight, "out": out, "eps": eps}
    constants = {
        "PARTS": parts,
        "WIDTH": width,
        "BLOCK_WIDTH": triton.next_power_of_2(width),
    }
    return Launch(norm_rows, (count,), arguments, constants, _WARPS, begins_early=True)


@triton.jit
def norm_rows(
    x, weight, out, eps, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """x [rows, WIDTH], weight [PARTS, WIDTH], by turns -> out as x; a program a row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH
    factor = tl.load(weight + row % PARTS * WIDTH + columns, mask=inside, other=0.0)
    wait_for_previous()
    own = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    normed = own * tl.rsqrt(tl.sum(own * own) / WIDTH + eps) * factor
    tl.store(out + row * WIDTH + columns, to_bf16(normed), mask=inside)
