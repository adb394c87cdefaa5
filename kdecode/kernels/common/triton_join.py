"""How a block of a CUDA plan ends: a product, or two, and the residual.

`join` is the launch of a block that ends in one product; what it shares with moe_join, which has
two, is `add_residual`. Knows no op. Doing the mix and norm of the next block in the program that
comes last was measured: alone on its processor it takes longer than a launch of a program a row,
and its registers leave fewer programs for the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import to_bf16
from kdecode.kernels.common.triton_product import product, product_rows, product_tile
from kdecode.kernels.contract import Buffers, Problem

BF16 = torch.bfloat16


def prepare_join(
    problem: Problem, matrix: Matrix, buffers: Buffers, names: tuple[str, str], *, is_push: bool
) -> TritonStep:
    """The launch of one product. names: the buffers of its input and of its output."""
    config, rows, inner = problem.config, plan_rows(problem), matrix.cols
    width = config.hidden_size
    tile = product_tile("join", problem.arch, rows, width, inner)
    prefix = tensor_for(buffers["prefix"], BF16, (rows, width), name="prefix")
    pushed = prefix  # not written
    if is_push:
        assert problem.layer is not None
        pushed = buffers["snapshots"][config.snapshots_before(problem.layer)]
        tensor_for(pushed, BF16, (rows, width), name="the pushed snapshot")
    arguments = {
        "x": tensor_for(buffers[names[0]], BF16, (rows, inner), name=names[0]),
        "weight": row_major(matrix, (width, inner), f"the matrix of {names[1]}"),
        "delta_out": tensor_for(buffers[names[1]], BF16, (rows, width), name=names[1]),
        "prefix": prefix,
        "pushed": pushed,
        "rows": rows,
    }
    constants = {
        "WIDTH": width,
        "INNER": inner,
        "BLOCK_R": product_rows(rows),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PUSH": is_push,
    }
    grid = (divide_up(width, tile.block_n),)
    return TritonStep(
        Launch(join, grid, arguments, constants, tile.warps, tile.stages, begins_early=True)
    )


@triton.jit
def add_residual(delta, at, inside, delta_out, prefix, pushed, PUSH: tl.constexpr):
    """delta in bf16 to ``at`` in its buffer and into the prefix. Returns the old one and the new.

    With PUSH the old prefix goes to ``pushed``, and a new one starts from delta.
    """
    tl.store(delta_out + at, delta, mask=inside)
    old = tl.load(prefix + at, mask=inside, other=0.0)
    if PUSH:
        tl.store(pushed + at, old, mask=inside)
        new = delta
    else:
        new = to_bf16(old.to(tl.float32) + delta.to(tl.float32))
    tl.store(prefix + at, new, mask=inside)
    return old, new


@triton.jit(do_not_specialize=["rows"])
def join(
    x,
    weight,
    delta_out,
    prefix,
    pushed,
    rows,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PUSH: tl.constexpr,
):
    """delta = bf16(x W^T) and the residual, BLOCK_N columns a program."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, WIDTH - 1)
    acc = product(x, weight, x, 0.0, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False)
    r = tl.arange(0, BLOCK_R)[None, :]
    inside = (r < rows) & (n < WIDTH)[:, None]
    at = r * WIDTH + n[:, None]
    add_residual(to_bf16(acc), at, inside, delta_out, prefix, pushed, PUSH)
