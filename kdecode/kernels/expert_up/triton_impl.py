"""expert_up in Triton: a program has a (row, slot) pair, or a distinct expert and all its pairs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.expert_launch import (
    BF16,
    PAIR_ROWS,
    TILE_ROWS,
    expert_input,
    expert_side,
    grouped_places,
    grouped_tile,
    pair_tile,
    paired,
    stack_of,
    up_arguments,
)
from kdecode.kernels.common.triton_experts import (
    expert_of_place,
    few_products,
    many_products,
    pairs_of_tile,
)
from kdecode.kernels.common.triton_join import plan_rows, refuse_plan_rows
from kdecode.kernels.common.triton_launch import Launch, TritonStep, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import gated, round_bf16, to_bf16
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its experts one `ExpertStack`."""
    config, rows = problem.config, plan_rows(problem)
    moe, side, name = config.moe, expert_side(config), expert_input(config)
    stack = stack_of(weights.mlp, buffers)
    is_coded = stack.down_scales is not None
    is_few = rows <= PAIR_ROWS
    source = tensor_for(buffers[name], BF16, (rows, side), name=name)
    out, out_shape = buffers["expert_product"], (rows, moe.top_k, moe.expert_width)
    arguments = {
        "x": paired(source, is_coded) if is_few else source,
        "ids": tensor_for(buffers["route_ids"], torch.int32, (rows, moe.top_k), name="route_ids"),
        **up_arguments(config, stack),
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
    if is_few:
        tile = pair_tile("expert_up", problem.arch, side, columns, is_coded)
        kernel, places = expert_up_pairs, pairs
    else:
        tile = grouped_tile("expert_up", problem.arch, side, columns, is_coded, TILE_ROWS)
        kernel = expert_up_grouped
        places, by_pair = grouped_places(config, rows)
        arguments["pairs"] = pairs
        constants |= {
            "BLOCK_P": triton.next_power_of_2(pairs),
            "BLOCK_R": TILE_ROWS,
            "BY_PAIR": by_pair,
        }
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    grid = (divide_up(columns, tile.block_n), places)
    return TritonStep(Launch(kernel, grid, arguments, constants, tile.warps, tile.stages))


@triton.jit
def _gate_up_lines(block, expert, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
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
    block = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    if (expert >= 0) & (expert < EXPERTS):
        lines, first = _gate_up_lines(block, expert, WIDTH, BLOCK_N)
        source = x + (pair // TOP_K) * (INNER // 2 if IS_CODED else INNER)
        lines = lines[None, :, None]
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    expert, match = expert_of_place(ids, tl.program_id(1), pairs, EXPERTS, BLOCK_P, BY_PAIR)
    count = tl.sum(match.to(tl.int32), axis=0)
    if (count > 0) & (expert < EXPERTS):
        rank = tl.cumsum(match.to(tl.int32), axis=0) - 1
        lines, first = _gate_up_lines(block, expert, WIDTH, BLOCK_N)
        for start in range(0, count, BLOCK_R):
            pair = pairs_of_tile(match, rank, start, BLOCK_P, BLOCK_R)
            has_row = start + tl.arange(0, BLOCK_R) < count
            at = (pair // TOP_K).to(tl.int64) * INNER
            sums = many_products(
                x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K, IS_CODED
            )
            halves = tl.permute(tl.reshape(sums, [BLOCK_N // 2, 2, BLOCK_R]), (0, 2, 1))
            gate, up = tl.split(halves)
            values = gated(round_bf16(gate), round_bf16(up), beta, bound, IS_SITU)
            n = (first + tl.arange(0, BLOCK_N // 2))[:, None]
            inside = has_row[None, :] & (n < WIDTH)
            tl.store(out + pair[None, :] * WIDTH + n, to_bf16(values), mask=inside)
