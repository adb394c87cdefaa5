"""dense_up in Triton: a program has the gate and up rows of its columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import gated, round_bf16, to_bf16
from kdecode.kernels.common.triton_product import product, product_rows, product_tile
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.dense_up.op import UpWeights


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: `UpWeights`, or a `PackedLayer` whose ``mlp`` is a `PackedMlp`; in "rows"."""
    up = weights if isinstance(weights, UpWeights) else UpWeights(weights.mlp.gate_up)
    config, rows = problem.config, plan_rows(problem)
    width, inner = up.gate_up.rows // 2, config.hidden_size
    tile = product_tile("dense_up", problem.arch, rows, width, inner)
    source, out = buffers["mlp_in"], buffers[up.output]
    arguments = {
        "x": tensor_for(source, torch.bfloat16, (rows, inner), name="mlp_in"),
        "weight": row_major(up.gate_up, (2 * width, inner), f"the gate and up of {up.output}"),
        "out": tensor_for(out, torch.bfloat16, (rows, width), name=up.output),
        "beta": config.activation.beta or 0.0,
        "bound": config.activation.linear_beta or 0.0,
        "rows": rows,
    }
    constants = {
        "IS_SITU": config.activation.kind == "situ",
        "COLUMNS": width,
        "INNER": inner,
        "BLOCK_R": product_rows(rows),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    grid = (divide_up(width, tile.block_n),)
    return TritonStep(
        Launch(dense_up, grid, arguments, constants, tile.warps, tile.stages, begins_early=True)
    )


@triton.jit(do_not_specialize=["rows"])
def dense_up(
    x,
    weight,
    out,
    beta,
    bound,
    rows,
    IS_SITU: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, COLUMNS - 1)
    gate = product(x, weight, x, 0.0, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False)
    held += COLUMNS
    up = product(x, weight, x, 0.0, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False)
    values = gated(round_bf16(gate), round_bf16(up), beta, bound, IS_SITU)
    r = tl.arange(0, BLOCK_R)[None, :]
    inside = (r < rows) & (n < COLUMNS)[:, None]
    tl.store(out + r * COLUMNS + n[:, None], to_bf16(values), mask=inside)
