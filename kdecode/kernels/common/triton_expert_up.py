"""Gate, up and activation of the experts that rows chose: the launch of a step of up to 64 rows.

A program has a (row, slot) pair, or a distinct expert and all its pairs (`triton_experts.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.config import ExpertProducts, ModelConfig
from kdecode.kernels.common.expert_launch import (
    BF16,
    TILE_ROWS,
    expert_side,
    grouped_places,
    grouped_tile,
    pair_tile,
    paired,
    up_arguments,
)
from kdecode.kernels.common.expert_products import is_scaled
from kdecode.kernels.common.expert_squares import PAIR_ROWS
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.triton_experts import (
    expert_of_place,
    few_products,
    many_products,
    pairs_of_tile,
)
from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import gated, round_bf16, to_bf16, wait_for_previous
from kdecode.kernels.common.triton_scaled import scaled_products


def up_launch(
    config: ModelConfig,
    arch: str,
    stack: ExpertStack,
    source: Tensor,
    ids: Tensor,
    out: Tensor,
    products: ExpertProducts = "exact",
) -> Launch:
    """source [R, side] bf16 and ids [R, N] int32 -> out [R, N, F] bf16."""
    moe, side, rows = config.moe, expert_side(config), source.shape[0]
    is_coded = stack.down_scales is not None
    scaled = is_scaled(products, is_coded, rows)
    source = tensor_for(source, BF16, (rows, side), name="the experts' input")
    out_shape = (rows, moe.top_k, moe.expert_width)
    arguments: dict[str, Any] = {
        "ids": tensor_for(ids, torch.int32, (rows, moe.top_k), name="route_ids"),
        **up_arguments(config, stack, as_bytes=scaled),
        "out": tensor_for(out, BF16, out_shape, name="expert_product"),
        "beta": config.activation.beta or 0.0,
        "bound": config.activation.linear_beta or 0.0,
    }
    constants = {
        "TOP_K": moe.top_k,
        "EXPERTS": moe.num_experts,
        "INNER": side,
        "WIDTH": moe.expert_width,
        "IS_CODED": is_coded,
        "IS_SITU": config.activation.kind == "situ",
    }
    columns, pairs = 2 * moe.expert_width, rows * moe.top_k
    if rows <= PAIR_ROWS:
        tile = pair_tile("expert_up", arch, side, columns, is_coded)
        kernel, places = expert_up_pairs, pairs
        arguments["x"] = paired(source, is_coded)
    else:
        sizes = (side, columns, is_coded, TILE_ROWS)
        tile = grouped_tile("expert_up", arch, *sizes, is_scaled=scaled)
        kernel = expert_up_grouped
        places, by_pair = grouped_places(config, rows)
        arguments |= {"x": source, "pairs": pairs}
        constants |= {
            "BLOCK_P": triton.next_power_of_2(pairs),
            "BLOCK_R": TILE_ROWS,
            "BY_PAIR": by_pair,
            "IS_SCALED": scaled,
        }
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    grid = (divide_up(columns, tile.block_n), places)
    return Launch(kernel, grid, arguments, constants, tile.warps, tile.stages, begins_early=True)


@triton.jit
def gate_up_lines(block, expert, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Gate and up of one column are neighbours: lines of gate_up [BLOCK_N], their first column."""
    at = tl.arange(0, BLOCK_N)
    first = block * (BLOCK_N // 2)
    held = tl.minimum(first + at // 2, WIDTH - 1) + (at % 2) * WIDTH
    return expert.to(tl.int64) * (2 * WIDTH) + held, first


@triton.jit
def expert_up_pairs(
    x,
    ids,
    data,
    scales,
    out,
    beta,
    bound,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_CODED: tl.constexpr,
    IS_SITU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_previous()
    block = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    if (expert >= 0) & (expert < EXPERTS):
        lines, first = gate_up_lines(block, expert, WIDTH, BLOCK_N)
        source = x + (pair // TOP_K) * (INNER // 2 if IS_CODED else INNER)
        lines = lines[:, None, None]
        sums = few_products(source, data, scales, lines, lines >= 0, INNER, BLOCK_K, IS_CODED)
        gate, up = tl.split(tl.reshape(sums, [BLOCK_N // 2, 2]))
        values = gated(round_bf16(gate), round_bf16(up), beta, bound, IS_SITU)
        n = first + tl.arange(0, BLOCK_N // 2)
        tl.store(out + pair * WIDTH + n, to_bf16(values), mask=n < WIDTH)


@triton.jit(do_not_specialize=["pairs"])
def expert_up_grouped(
    x,
    ids,
    data,
    scales,
    out,
    beta,
    bound,
    pairs,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_CODED: tl.constexpr,
    IS_SITU: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BY_PAIR: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_previous()
    block = tl.program_id(0)
    expert, match = expert_of_place(ids, tl.program_id(1), pairs, EXPERTS, BLOCK_P, BY_PAIR)
    count = tl.sum(match.to(tl.int32), axis=0)
    if (count > 0) & (expert < EXPERTS):
        last = -1
        lines, first = gate_up_lines(block, expert, WIDTH, BLOCK_N)
        for start in range(0, count, BLOCK_R):
            pair, last = pairs_of_tile(match, last, count - start, BLOCK_P, BLOCK_R)
            has_row = start + tl.arange(0, BLOCK_R) < count
            at = (pair // TOP_K).to(tl.int64) * INNER
            if IS_SCALED:
                sums = scaled_products(x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K)
            else:
                sums = many_products(
                    x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K, IS_CODED
                )
            halves = tl.permute(tl.reshape(sums, [BLOCK_N // 2, 2, BLOCK_R]), (0, 2, 1))
            gate, up = tl.split(halves)
            values = gated(round_bf16(gate), round_bf16(up), beta, bound, IS_SITU)
            n = (first + tl.arange(0, BLOCK_N // 2))[:, None]
            inside = has_row[None, :] & (n < WIDTH)
            tl.store(out + pair[None, :] * WIDTH + n, to_bf16(values), mask=inside)
