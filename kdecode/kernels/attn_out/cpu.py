"""attn_out on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    refuse_device,
    refuse_rows,
    set_exchange,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

BF16 = torch.bfloat16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = [*refuse_device(problem), *refuse_rows(problem)]
    width = _heads_width(problem)
    if width % 2:
        reasons.append(f"Native tiles hold pairs of columns; the attention's width {width} is odd.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer`."""
    config, rows, layer = problem.config, step_rows(problem), problem.layer
    assert layer is not None
    width, inner = config.hidden_size, _heads_width(problem)
    o_proj = weights.attention.o_proj
    args = _native.AttnOutArgs()
    args.rows = rows
    args.o_proj = tiles_of("The attention's o_proj", o_proj, width, inner)
    args.attn_out = ptr(buffers["attn_out"], BF16, (rows, inner))
    args.attn_delta = ptr(buffers["attn_delta"], BF16, (rows, width))
    args.prefix = ptr(buffers["prefix"], BF16, (rows, width))
    alive = [o_proj, buffers["attn_out"], buffers["attn_delta"], buffers["prefix"]]
    if config.is_snapshot_layer(layer):
        snapshot = buffers["snapshots"][config.snapshots_before(layer)]
        args.snapshot = ptr(snapshot, BF16, (rows, width))
        alive.append(snapshot)
    set_exchange(args, problem, buffers, 4 * rows * width)
    return NativeStep(buffers.pool, problem.isa, "attn_out", args, alive)


def _heads_width(problem: Problem) -> int:
    """Columns of `attn_out` in this layer."""
    config, layer = problem.config, problem.layer
    assert layer is not None
    if config.layer_kinds[layer] == "kda":
        return config.kda.width
    return config.mla.num_heads * config.mla.v_dim
