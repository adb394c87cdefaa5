"""moe_join in Triton: a program makes its columns of both products and of the residual.

Every program normalises all of the latents as it reads them: one or two rows whole, of more rows a
block at a time, with the sums of squares that expert_down has left.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.expert_squares import num_squares
from kdecode.kernels.common.triton_join import add_residual
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import round_bf16, to_bf16, wait_for_previous
from kdecode.kernels.common.triton_product import FEW_ROWS, product, product_rows, product_tile
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.moe_join.op import SharedMade

BF16, FP32 = torch.bfloat16, torch.float32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its matrices in "rows"; `SharedMade`
    of one whose shared experts have been run."""
    is_made = isinstance(weights, SharedMade)
    moe = (weights.layer if is_made else weights).mlp
    config, rows = problem.config, plan_rows(problem)
    width = config.hidden_size
    side = config.moe.latent_width or width
    tile = product_tile("moe_join", problem.arch, rows, width, side)
    delta, prefix = buffers["mlp_delta"], buffers["prefix"]
    # One or two rows are normalised whole.
    has_rows = moe.latent_norm is not None and rows <= FEW_ROWS
    arguments = {
        "source": tensor_for(buffers["expert_sum"], BF16, (rows, side), name="expert_sum"),
        "delta_out": tensor_for(delta, BF16, (rows, width), name="mlp_delta"),
        "prefix": tensor_for(prefix, BF16, (rows, width), name="prefix"),
        "eps": config.rms_eps,
        "rows": rows,
        **_latents(problem, moe, buffers),
        **_shared(problem, moe, buffers, is_made=is_made),
    }
    constants = {
        "SIDE": side,
        "SHARED": config.moe.shared_width,
        "IS_MADE": is_made,
        "HAS_LATENTS": moe.latent_up is not None,
        "NORM": moe.latent_norm is not None,
        "NUM_SQUARES": num_squares(config, rows),
        "WIDTH": width,
        "BLOCK_R": product_rows(rows),
        "BLOCK_N": tile.block_n,
        "BLOCK_SIDE": triton.next_power_of_2(side) if has_rows else tile.block_k,
        "BLOCK_SHARED": tile.block_k,
    }
    grid, warps = (divide_up(width, tile.block_n),), tile.warps
    if has_rows:
        # At most 32 columns of a matrix's row a thread.
        warps = max(warps, constants["BLOCK_SIDE"] // 1024)
    return TritonStep(
        Launch(moe_join, grid, arguments, constants, warps, tile.stages, begins_early=True)
    )


def _latents(problem: Problem, moe: Any, buffers: Buffers) -> dict[str, Tensor]:
    """The way back from the latents; without them nothing of it is read or written."""
    config, rows = problem.config, plan_rows(problem)
    width, side, unused = config.hidden_size, config.moe.latent_width, buffers["prefix"]
    found = dict.fromkeys(("latent_up", "latent_norm", "squares", "routed"), unused)
    if moe.latent_up is None:
        return found
    assert side is not None
    if moe.latent_norm is not None:
        found["latent_norm"] = tensor_for(moe.latent_norm, FP32, (side,), name="the latents' norm")
    if blocks := num_squares(config, rows):
        squares = buffers["expert_squares"]
        found["squares"] = tensor_for(squares, FP32, (blocks, rows), name="expert_squares")
    found["latent_up"] = row_major(moe.latent_up, (width, side), "latent_up")
    found["routed"] = tensor_for(buffers["routed"], BF16, (rows, width), name="routed")
    return found


def _shared(problem: Problem, moe: Any, buffers: Buffers, *, is_made: bool) -> dict[str, Tensor]:
    """The shared experts' product and down projection, or their value where it has been made;
    without them nothing of it is read or written."""
    rows, width, unused = plan_rows(problem), problem.config.hidden_size, buffers["prefix"]
    inner = problem.config.moe.shared_width
    found = {"shared_product": unused, "shared_down": unused, "shared": unused}
    if inner:
        found["shared"] = tensor_for(buffers["shared"], BF16, (rows, width), name="shared")
    if inner and not is_made:
        product, down = buffers["shared_product"], moe.shared.down
        found["shared_product"] = tensor_for(product, BF16, (rows, inner), name="shared_product")
        found["shared_down"] = row_major(down, (width, inner), "the shared down matrix")
    return found


@triton.jit(do_not_specialize=["rows"])
def moe_join(
    source,
    latent_up,
    latent_norm,
    squares,
    routed,
    shared_product,
    shared_down,
    shared,
    delta_out,
    prefix,
    eps,
    rows,
    SIDE: tl.constexpr,
    SHARED: tl.constexpr,
    IS_MADE: tl.constexpr,
    HAS_LATENTS: tl.constexpr,
    NORM: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIDE: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, WIDTH - 1)
    r = tl.arange(0, BLOCK_R)[None, :]
    at = r * WIDTH + n[:, None]
    inside = (r < rows) & (n < WIDTH)[:, None]
    if HAS_LATENTS:
        acc = product(
            source,
            latent_up,
            latent_norm,
            eps,
            held,
            rows,
            0,
            SIDE,
            SIDE,
            BLOCK_R,
            BLOCK_N,
            BLOCK_SIDE,
            NORM,
            squares,
            NUM_SQUARES,
        )
        tl.store(routed + at, to_bf16(acc), mask=inside)
        delta = round_bf16(acc)
    else:
        wait_for_previous()
        delta = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if IS_MADE:
        delta += tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    elif SHARED > 0:
        acc = product(
            shared_product,
            shared_down,
            shared_product,
            eps,
            held,
            rows,
            0,
            SHARED,
            SHARED,
            BLOCK_R,
            BLOCK_N,
            BLOCK_SHARED,
            False,
        )
        tl.store(shared + at, to_bf16(acc), mask=inside)
        delta += round_bf16(acc)
    add_residual(to_bf16(delta), at, inside, delta_out, prefix, prefix, False)
