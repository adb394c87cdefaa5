"""expert_down in Triton: programs of a row, or of a distinct expert for all its pairs.

A program of a row has a block of its columns for all of its slots, and so their sum. Programs of an
expert write each pair's output; the last of a block of columns sums up all rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.expert_launch import (
    BF16,
    PAIR_ROWS,
    TILE_ROWS,
    down_arguments,
    expert_side,
    grouped_places,
    grouped_tile,
    pair_tile,
    paired,
    stack_of,
)
from kdecode.kernels.common.triton_experts import (
    expert_of_place,
    few_products,
    many_products,
    pairs_of_tile,
    weighted_sums,
)
from kdecode.kernels.common.triton_join import plan_rows, refuse_plan_rows
from kdecode.kernels.common.triton_launch import Launch, TritonStep, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import is_last_arrival, round_bf16, to_bf16
from kdecode.kernels.contract import Buffers, Problem

# Slots whose weights a program of a row loads at a time, and rows that are summed up at a time.
_SLOTS = 16
_SUM_ROWS = 16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its experts one `ExpertStack`."""
    config, rows = problem.config, plan_rows(problem)
    moe, side, width = config.moe, expert_side(config), config.moe.expert_width
    stack = stack_of(weights.mlp, buffers)
    is_coded = stack.down_scales is not None
    is_few = rows <= PAIR_ROWS
    slots = (rows, moe.top_k)
    source = buffers["expert_product"]
    source = tensor_for(source, BF16, (*slots, width), name="expert_product")
    chosen, out = buffers["route_weights"], buffers["expert_sum"]
    arguments = {
        "x": paired(source, is_coded) if is_few else source,
        "ids": tensor_for(buffers["route_ids"], torch.int32, slots, name="route_ids"),
        "weights": tensor_for(chosen, torch.float32, slots, name="route_weights"),
        **down_arguments(config, stack),
        "out": tensor_for(out, BF16, (rows, side), name="expert_sum"),
    }
    constants = {
        "TOP_K": moe.top_k,
        "EXPERTS": moe.num_experts,
        "INNER": width,
        "SIDE": side,
        "IS_CODED": is_coded,
    }
    if is_few:
        together = min(_SLOTS, triton.next_power_of_2(moe.top_k))
        tile = pair_tile("expert_down", problem.arch, width, side, is_coded, together)
        kernel, places = expert_down_rows, rows
        constants |= {"BLOCK_SLOTS": together}
    else:
        tile = grouped_tile("expert_down", problem.arch, width, side, is_coded, TILE_ROWS)
        kernel = expert_down_grouped
        places, by_pair = grouped_places(config, rows)
        pairs = rows * moe.top_k
        arguments |= {
            "outputs": buffers.scratch("expert_outputs", (*slots, side), BF16),
            "counters": buffers.counters(divide_up(side, tile.block_n)),
            "rows": rows,
            "places": places,
        }
        constants |= {
            "BLOCK_P": triton.next_power_of_2(pairs),
            "BLOCK_R": TILE_ROWS,
            "BLOCK_SUM": min(_SUM_ROWS, triton.next_power_of_2(rows)),
            "BY_PAIR": by_pair,
        }
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    grid = (divide_up(side, tile.block_n), places)
    return TritonStep(Launch(kernel, grid, arguments, constants, tile.warps, tile.stages))


@triton.jit
def expert_down_rows(
    x,
    ids,
    weights,
    data,
    scales,
    out,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    SIDE: tl.constexpr,
    IS_CODED: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, TOP_K, BLOCK_SLOTS):
        slot = first + tl.arange(0, BLOCK_SLOTS)
        pair = row * TOP_K + slot
        expert = tl.load(ids + pair, mask=slot < TOP_K, other=0)
        weight = tl.load(weights + pair, mask=slot < TOP_K, other=0.0)
        is_valid = (expert >= 0) & (expert < EXPERTS)
        lines = expert.to(tl.int64)[:, None, None] * SIDE + n[None, :, None]
        is_line = (is_valid & (slot < TOP_K))[:, None, None] & (n < SIDE)[None, :, None]
        # Slots that a row does not have read the first one's input, and have no line.
        held = tl.where(slot < TOP_K, pair, row * TOP_K)
        source = x + (held * (INNER // 2 if IS_CODED else INNER))[:, None, None]
        sums = few_products(source, data, scales, lines, is_line, INNER, BLOCK_K, IS_CODED)
        # What is not read counts nothing: not the left-over product of an id that is no expert.
        share = tl.where(is_line.reshape(BLOCK_SLOTS, BLOCK_N), round_bf16(sums), 0.0)
        share = tl.where(is_valid[:, None], weight[:, None] * share, float("nan"))
        total += tl.sum(share, axis=0)
    tl.store(out + row * SIDE + n, to_bf16(total), mask=n < SIDE)


@triton.jit(do_not_specialize=["rows", "places"])
def expert_down_grouped(
    x,
    ids,
    weights,
    data,
    scales,
    out,
    outputs,
    counters,
    rows,
    places,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    SIDE: tl.constexpr,
    IS_CODED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SUM: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    place = tl.program_id(1)
    expert, match = expert_of_place(ids, place, rows * TOP_K, EXPERTS, BLOCK_P, BY_PAIR)
    count = tl.sum(match.to(tl.int32), axis=0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, SIDE - 1)
    if (count > 0) & (expert < EXPERTS):
        rank = tl.cumsum(match.to(tl.int32), axis=0) - 1
        lines = expert.to(tl.int64) * SIDE + held
        for start in range(0, count, BLOCK_R):
            pair = pairs_of_tile(match, rank, start, BLOCK_P, BLOCK_R)
            has_row = start + tl.arange(0, BLOCK_R) < count
            at = pair.to(tl.int64) * INNER
            sums = many_products(
                x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K, IS_CODED
            )
            inside = has_row[None, :] & (n < SIDE)[:, None]
            place_out = outputs + pair.to(tl.int64)[None, :] * SIDE + n[:, None]
            tl.store(place_out, to_bf16(sums), mask=inside)
    if is_last_arrival(counters + block, places):
        for start in range(0, rows, BLOCK_SUM):
            row = (start + tl.arange(0, BLOCK_SUM)).to(tl.int64)[:, None]
            total = weighted_sums(
                outputs, ids, weights, row, row < rows, held[None, :], TOP_K, EXPERTS, SIDE
            )
            inside = (row < rows) & (n < SIDE)[None, :]
            tl.store(out + row * SIDE + n[None, :], to_bf16(total), mask=inside)
