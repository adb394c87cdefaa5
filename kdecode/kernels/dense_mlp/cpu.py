"""dense_mlp on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    refuse_gated_width,
    refuse_mix_norm,
    refuse_rows,
    set_activation,
    set_exchange,
    set_mlp_mix_norm,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return [
        *refuse_rows(problem),
        *refuse_mix_norm(problem.config),
        *refuse_gated_width("The width of the dense MLP", problem.config.dense_width),
    ]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMlp`."""
    config, rows = problem.config, step_rows(problem)
    width, inner, mlp = config.hidden_size, config.dense_width, weights.mlp
    args = _native.DenseMlpArgs()
    used = set_mlp_mix_norm(args, problem, weights, buffers)
    set_activation(args, config.activation)
    args.gate_up = tiles_of("The dense gate_up matrix", mlp.gate_up, 2 * inner, width)
    args.down = tiles_of("The dense down matrix", mlp.down, width, inner)
    product = buffers.scratch("dense_product", (rows, inner))
    args.product = ptr(product, torch.bfloat16, (rows, inner))
    args.mlp_delta = ptr(buffers["mlp_delta"], torch.bfloat16, (rows, width))
    args.residual = ptr(buffers["prefix"], torch.bfloat16, (rows, width))
    set_exchange(args, problem, buffers, 4 * rows * width)
    alive = (*used, mlp, product, buffers["mlp_delta"])
    return NativeStep(buffers.pool, problem.isa, "dense_mlp", args, alive)
