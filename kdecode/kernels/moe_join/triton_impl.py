"""moe_join in Triton: a program makes its columns of both products and of the residual.

One or two rows of latents are normalised by every program, more by a launch before the join.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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

BF16 = torch.bfloat16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its matrices in "rows"."""
    config, rows, moe = problem.config, plan_rows(problem), weights.mlp
    width = config.hidden_size
    side = config.moe.latent_width or width
    tile = product_tile("moe_join", problem.arch, rows, width, side)
    delta, prefix = buffers["mlp_delta"], buffers["prefix"]
    source = tensor_for(buffers["expert_sum"], BF16, (rows, side), name="expert_sum")
    first, norms_rows = (), moe.latent_norm is not None and rows <= FEW_ROWS
    if moe.latent_norm is not None and not norms_rows:
        first = (_norm_launch(rows, side, moe.latent_norm, config.rms_eps, buffers),)
        source = buffers.scratch("expert_sum_normed", (rows, side))
    arguments = {
        "source": source,
        "delta_out": tensor_for(delta, BF16, (rows, width), name="mlp_delta"),
        "prefix": tensor_for(prefix, BF16, (rows, width), name="prefix"),
        "eps": config.rms_eps,
        "rows": rows,
        **_latents(problem, moe, buffers),
        **_shared(problem, moe, buffers),
    }
    constants = {
        "SIDE": side,
        "SHARED": config.moe.shared_width,
        "HAS_LATENTS": moe.latent_up is not None,
        "NORM": norms_rows,
        "WIDTH": width,
        "BLOCK_R": product_rows(rows),
        "BLOCK_N": tile.block_n,
        # Whole rows are normalised.
        "BLOCK_SIDE": triton.next_power_of_2(side) if norms_rows else tile.block_k,
        "BLOCK_SHARED": tile.block_k,
    }
    grid, warps = (divide_up(width, tile.block_n),), tile.warps
    if norms_rows:
        # At most 32 columns of a matrix's row a thread.
        warps = max(warps, constants["BLOCK_SIDE"] // 1024)
    launch = Launch(moe_join, grid, arguments, constants, warps, tile.stages, begins_early=True)
    launches = (*first, launch)
    return TritonStep(launches[0], then=launches[1:])


def _norm_launch(rows: int, side: int, weight: Tensor, eps: float, buffers: Buffers) -> Launch:
    """Of many rows, whose norms every program of the join would otherwise make again."""
    arguments = {
        "source": buffers["expert_sum"],
        "weight": tensor_for(weight, torch.float32, (side,), name="the latents' norm"),
        "out": buffers.scratch("expert_sum_normed", (rows, side)),
        "eps": eps,
    }
    constants = {"SIDE": side, "BLOCK_SIDE": triton.next_power_of_2(side)}
    return Launch(norm_latents, (rows,), arguments, constants, num_warps=4, begins_early=True)


def _latents(problem: Problem, moe: Any, buffers: Buffers) -> dict[str, Tensor]:
    """The way back from the latents; without them nothing of it is read or written."""
    rows, width, side = plan_rows(problem), problem.config.hidden_size, problem.config.moe
    unused = buffers["prefix"]
    if moe.latent_up is None:
        return {"latent_up": unused, "latent_norm": unused, "routed": unused}
    assert side.latent_width is not None
    norm = moe.latent_norm
    if norm is not None:
        tensor_for(norm, torch.float32, (side.latent_width,), name="the latents' norm")
    return {
        "latent_up": row_major(moe.latent_up, (width, side.latent_width), "latent_up"),
        "latent_norm": unused if norm is None else norm,
        "routed": tensor_for(buffers["routed"], BF16, (rows, width), name="routed"),
    }


def _shared(problem: Problem, moe: Any, buffers: Buffers) -> dict[str, Tensor]:
    """The down projection of the shared experts; without them nothing of it is read or written."""
    rows, width, unused = plan_rows(problem), problem.config.hidden_size, buffers["prefix"]
    inner = problem.config.moe.shared_width
    if not inner:
        return {"shared_product": unused, "shared_down": unused, "shared": unused}
    return {
        "shared_product": tensor_for(
            buffers["shared_product"], BF16, (rows, inner), name="shared_product"
        ),
        "shared_down": row_major(moe.shared.down, (width, inner), "the shared down matrix"),
        "shared": tensor_for(buffers["shared"], BF16, (rows, width), name="shared"),
    }


@triton.jit
def norm_latents(source, weight, out, eps, SIDE: tl.constexpr, BLOCK_SIDE: tl.constexpr):
    """RMSNorm of one row, rounded."""
    k = tl.arange(0, BLOCK_SIDE)
    at, inside = tl.program_id(0) * SIDE + k, k < SIDE
    share = tl.load(weight + k, mask=inside, other=0.0)
    wait_for_previous()
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / SIDE + eps) * share
    tl.store(out + at, to_bf16(normed), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def moe_join(
    source,
    latent_up,
    latent_norm,
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
    HAS_LATENTS: tl.constexpr,
    NORM: tl.constexpr,
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
        )
        tl.store(routed + at, to_bf16(acc), mask=inside)
        delta = round_bf16(acc)
    else:
        wait_for_previous()
        delta = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if SHARED > 0:
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
    add_residual(to_bf16(delta), n, rows, delta_out, prefix, prefix, WIDTH, BLOCK_R, False)
