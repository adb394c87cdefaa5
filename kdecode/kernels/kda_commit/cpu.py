"""kda_commit on the native CPU kernels: one layer, every slot of the step."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import refuse_device, refuse_rows, step_rows
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

# The front records the rows and states what its heads and convolution have to be.
CONV_WIDTH = 4


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return [*refuse_device(problem), *refuse_rows(problem)]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: none are used. ``buffers.effects`` has the layer's `RowEffects` of the step."""
    rows, layer, kda = step_rows(problem), problem.layer, problem.config.kda
    assert layer is not None
    window, state = buffers.caches.conv[layer], buffers.caches.recurrent[layer]
    effects, kept = buffers.effects[layer], buffers["kept_rows"]
    slots, dim = window.shape[0], kda.head_dim
    heads = (rows, kda.num_heads, dim)
    args = _native.KdaCommitArgs()
    args.max_requests, args.heads, args.head_dim = kept.shape[0], kda.num_heads, dim
    args.kept = ptr(kept, torch.int32, (rows // problem.rows_per_request, 3))
    args.window = ptr(window, torch.bfloat16, (slots, CONV_WIDTH - 1, 3 * kda.width))
    args.state = ptr(state, torch.float32, (slots, kda.num_heads, dim, dim))
    args.keys = ptr(effects.keys, torch.float32, heads)
    args.decays = ptr(effects.decays, torch.float32, heads)
    args.corrections = ptr(effects.corrections, torch.float32, heads)
    args.samples = ptr(effects.samples, torch.bfloat16, (rows, 3 * kda.width))
    alive = (kept, window, state, effects)
    return NativeStep(buffers.pool, problem.isa, "kda_commit", args, alive)
