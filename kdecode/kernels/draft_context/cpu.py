"""draft_context on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import refuse_device, refuse_rows, step_rows, tiles_of
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32 = torch.bfloat16, torch.float32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return [*refuse_device(problem), *refuse_rows(problem)]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `DraftPlanWeights`."""
    rows, width = step_rows(problem), problem.config.hidden_size
    taps = buffers["taps"]
    columns = taps.shape[1] * width
    args = _native.DraftContextArgs()
    args.rows, args.eps = rows, problem.config.rms_eps
    args.proj = tiles_of("The draft's context_proj", weights.context_proj, width, columns)
    args.norm = ptr(weights.context_norm, FP32, (width,))
    args.taps = ptr(taps, BF16, (rows, taps.shape[1], width))
    projected = buffers.scratch("draft_projected", (rows, width))
    args.projected = ptr(projected, BF16, (rows, width))
    args.context = ptr(buffers["context"], BF16, (rows, width))
    alive = [weights, taps, projected, buffers["context"]]
    if weights.tap_norms is not None:
        normed = buffers.scratch("draft_normed", (rows, columns))
        args.tap_norms = ptr(weights.tap_norms, FP32, (taps.shape[1], width))
        args.normed = ptr(normed, BF16, (rows, columns))
        alive.append(normed)
    return NativeStep(buffers.pool, problem.isa, "draft_context", args, alive)
