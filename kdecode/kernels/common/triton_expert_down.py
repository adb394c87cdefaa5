"""The weighted sum of the outputs of each row's experts: the launch of a step of up to 64 rows.

A program of a row has a block of its columns for all of its slots, and so their sum. Programs of a
distinct expert write the outputs of all its pairs; the last of a block of columns sums up all rows.
Whoever has a sum may also leave its square for a norm, as one number a row and block of columns. On
one of several ranks the first lines of the grid make the part of the shared experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.config import ExpertProducts, ModelConfig
from kdecode.kernels.common.expert_launch import (
    BF16,
    TILE_ROWS,
    down_arguments,
    expert_side,
    grouped_places,
    grouped_tile,
    pair_tile,
    paired,
)
from kdecode.kernels.common.expert_products import is_scaled
from kdecode.kernels.common.expert_squares import PAIR_ROWS, num_squares, square_columns
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.triton_experts import (
    expert_of_place,
    few_products,
    many_products,
    pairs_of_tile,
    weighted_sums,
)
from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import is_last_arrival, wait_for_previous
from kdecode.kernels.common.triton_peers import Signal, signal_if_last
from kdecode.kernels.common.triton_scaled import scaled_products
from kdecode.kernels.common.triton_shared_down import SharedDown, shared_down, shared_lines

# Slots whose weights a program of a row loads at a time, and rows that are summed up at a time.
_SLOTS = 16
_SUM_ROWS = 16
# Columns of the narrowest block: counters are made for as many.
_LEAST_COLUMNS = 16


@dataclass(frozen=True)
class Choice:
    """ids [R, N] int32 and weights [R, N] fp32 of the experts of each row."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Gathering:
    """What grouped programs need: outputs bf16 [R, N, side] of every pair, zeroed int32 counters.

    The programs leave the counters as they were.
    """

    outputs: Tensor
    counters: Tensor


def num_counters(config: ModelConfig) -> int:
    """Enough for any tile."""
    return divide_up(expert_side(config), _LEAST_COLUMNS)


def is_grouped(rows: int) -> bool:
    """Whether a launch for so many rows needs a `Gathering`."""
    return rows > PAIR_ROWS


def down_launch(
    config: ModelConfig,
    arch: str,
    stack: ExpertStack,
    product: Tensor,
    choice: Choice,
    out: Tensor,
    gathering: Gathering | None,
    squares: Tensor | None = None,
    shared: SharedDown | None = None,
    signal: Signal | None = None,
    products: ExpertProducts = "exact",
) -> Launch:
    """product [R, N, F] bf16 -> out [R, side], of one of several ranks its part in fp32, of which
    nothing is rounded. gathering: None unless `is_grouped`; its outputs are of that dtype. squares:
    `expert_squares`, if they are to be made; ValueError for a tile that has no whole blocks.
    shared: a part that programs in front of the others make. signal: of what both parts are all of.
    """
    moe, side, width = config.moe, expert_side(config), config.moe.expert_width
    is_coded, rows = stack.down_scales is not None, product.shape[0]
    scaled = is_scaled(products, is_coded, rows)
    slots = (rows, moe.top_k)
    product = tensor_for(product, BF16, (*slots, width), name="expert_product")
    arguments: dict[str, Any] = {
        "ids": tensor_for(choice.ids, torch.int32, slots, name="route_ids"),
        "weights": tensor_for(choice.weights, torch.float32, slots, name="route_weights"),
        **down_arguments(config, stack, as_bytes=scaled),
        "out": tensor_for(out, out.dtype, (rows, side), name="expert_sum"),
        "squares": out if squares is None else squares,
    }
    constants = {
        "TOP_K": moe.top_k,
        "EXPERTS": moe.num_experts,
        "INNER": width,
        "SIDE": side,
        "IS_CODED": is_coded,
    }
    if gathering is None:
        together = min(_SLOTS, triton.next_power_of_2(moe.top_k))
        sizes = (width, side, is_coded, together)
        tile = pair_tile("expert_down", arch, *sizes, has_squares=squares is not None)
        kernel, places = expert_down_rows, rows
        arguments["x"] = paired(product, is_coded)
        constants |= {"BLOCK_SLOTS": together}
    else:
        sizes = (width, side, is_coded, TILE_ROWS)
        tile = grouped_tile("expert_down", arch, *sizes, is_scaled=scaled)
        kernel = expert_down_grouped
        places, by_pair = grouped_places(config, rows)
        arguments |= {
            "x": product,
            "outputs": tensor_for(gathering.outputs, out.dtype, (*slots, side), name="outputs"),
            "counters": gathering.counters,
            "rows": rows,
            "places": places,
        }
        constants |= {
            "BLOCK_P": triton.next_power_of_2(rows * moe.top_k),
            "BLOCK_R": TILE_ROWS,
            "BLOCK_SUM": min(_SUM_ROWS, triton.next_power_of_2(rows)),
            "BY_PAIR": by_pair,
            "IS_SCALED": scaled,
        }
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants["SQUARE_COLUMNS"] = _square_columns(config, rows, squares, tile.block_n)
    blocks = divide_up(side, tile.block_n)
    lines, more_arguments, more_constants = shared_lines(shared, arch, rows, blocks, out)
    arguments |= more_arguments
    constants |= more_constants
    signal = signal or Signal({"arrivals": out, "peers": out}, {"PEERS": 0})
    arguments |= signal.arguments
    constants |= signal.constants
    grid = (blocks, lines + places)
    return Launch(kernel, grid, arguments, constants, tile.warps, tile.stages, begins_early=True)


def _square_columns(config: ModelConfig, rows: int, squares: Tensor | None, block_n: int) -> int:
    """0 without ``squares``, which are looked at too."""
    if squares is None:
        return 0
    columns, shape = square_columns(config, rows), (num_squares(config, rows), rows)
    tensor_for(squares, torch.float32, shape, name="expert_squares")
    if block_n % columns:
        raise ValueError(
            f"At {rows} rows expert_squares has a number for {columns} columns; programs of "
            f"expert_down have {block_n} columns, which are no multiple of that."
        )
    return columns


@triton.jit
def store_squares(
    squares, summed, begin, row, rows, SIDE: tl.constexpr, SQUARE_COLUMNS: tl.constexpr
):
    """Sums of squares of columns ``begin`` and on of bf16 ``summed`` [S, N], whose rows are ``row``
    [S, 1], into ``squares`` [blocks, rows]. What is behind SIDE counts nothing."""
    BLOCKS: tl.constexpr = summed.shape[1] // SQUARE_COLUMNS
    n = (begin + tl.arange(0, summed.shape[1]))[None, :]
    x = tl.where(n < SIDE, summed.to(tl.float32), 0.0)
    parts = tl.reshape(x * x, [summed.shape[0], BLOCKS, SQUARE_COLUMNS])
    block = (begin // SQUARE_COLUMNS + tl.arange(0, BLOCKS))[None, :]
    inside = (row < rows) & (block * SQUARE_COLUMNS < SIDE)
    tl.store(squares + block * rows + row, tl.sum(parts, axis=2), mask=inside)


@triton.jit
def expert_down_rows(
    x,
    ids,
    weights,
    data,
    scales,
    out,
    squares,
    shared_x,
    shared_weight,
    shared_out,
    arrivals,
    peers,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    SIDE: tl.constexpr,
    IS_CODED: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SQUARE_COLUMNS: tl.constexpr,
    SHARED_LINES: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_OUT: tl.constexpr,
    SHARED_R: tl.constexpr,
    SHARED_N: tl.constexpr,
    SHARED_K: tl.constexpr,
    PEERS: tl.constexpr,
):
    # Two conditions, of which the compiler knows one.
    if SHARED_LINES > 0:  # noqa: SIM102
        if tl.program_id(1) < SHARED_LINES:
            shared_down(
                tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
                shared_x,
                shared_weight,
                shared_out,
                tl.num_programs(1) - SHARED_LINES,
                SHARED,
                SHARED_OUT,
                SHARED_R,
                SHARED_N,
                SHARED_K,
            )
            signal_if_last(arrivals, tl.num_programs(0) * tl.num_programs(1), peers, PEERS)
            return
    wait_for_previous()
    row = tl.program_id(1) - SHARED_LINES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, TOP_K, BLOCK_SLOTS):
        slot = first + tl.arange(0, BLOCK_SLOTS)
        pair = row * TOP_K + slot
        expert = tl.load(ids + pair, mask=slot < TOP_K, other=0)
        weight = tl.load(weights + pair, mask=slot < TOP_K, other=0.0)
        is_valid = (expert >= 0) & (expert < EXPERTS)
        lines = expert.to(tl.int64)[None, :, None] * SIDE + n[:, None, None]
        is_line = (is_valid & (slot < TOP_K))[None, :, None] & (n < SIDE)[:, None, None]
        # Slots that a row does not have read the first one's input, and have no line.
        held = tl.where(slot < TOP_K, pair, row * TOP_K)
        source = x + (held * (INNER // 2 if IS_CODED else INNER))[None, :, None]
        sums = few_products(source, data, scales, lines, is_line, INNER, BLOCK_K, IS_CODED)
        # What is not read counts nothing: not the left-over product of an id that is no expert.
        # Rounded, unless it is a part.
        product = sums.to(out.dtype.element_ty).to(tl.float32)
        share = tl.where(is_line.reshape(BLOCK_N, BLOCK_SLOTS), product, 0.0)
        share = tl.where(is_valid[None, :], weight[None, :] * share, float("nan"))
        total += tl.sum(share, axis=1)
    summed = total.to(out.dtype.element_ty)
    tl.store(out + row * SIDE + n, summed, mask=n < SIDE)
    if SQUARE_COLUMNS > 0:
        line = (row + tl.arange(0, 1))[:, None]
        summed = tl.reshape(summed, [1, BLOCK_N])
        begin = tl.program_id(0) * BLOCK_N
        # A program a row.
        rows = tl.num_programs(1) - SHARED_LINES
        store_squares(squares, summed, begin, line, rows, SIDE, SQUARE_COLUMNS)
    signal_if_last(arrivals, tl.num_programs(0) * tl.num_programs(1), peers, PEERS)


@triton.jit(do_not_specialize=["rows", "places"])
def expert_down_grouped(
    x,
    ids,
    weights,
    data,
    scales,
    out,
    squares,
    shared_x,
    shared_weight,
    shared_out,
    arrivals,
    peers,
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
    IS_SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SQUARE_COLUMNS: tl.constexpr,
    SHARED_LINES: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_OUT: tl.constexpr,
    SHARED_R: tl.constexpr,
    SHARED_N: tl.constexpr,
    SHARED_K: tl.constexpr,
    PEERS: tl.constexpr,
):
    # Two conditions, of which the compiler knows one.
    if SHARED_LINES > 0:  # noqa: SIM102
        if tl.program_id(1) < SHARED_LINES:
            shared_down(
                tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
                shared_x,
                shared_weight,
                shared_out,
                rows,
                SHARED,
                SHARED_OUT,
                SHARED_R,
                SHARED_N,
                SHARED_K,
            )
            # Of the experts' programs the last of each block of columns makes the sum.
            signal_if_last(arrivals, tl.num_programs(0) * (SHARED_LINES + 1), peers, PEERS)
            return
    wait_for_previous()
    block = tl.program_id(0)
    place = tl.program_id(1) - SHARED_LINES
    expert, match = expert_of_place(ids, place, rows * TOP_K, EXPERTS, BLOCK_P, BY_PAIR)
    count = tl.sum(match.to(tl.int32), axis=0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, SIDE - 1)
    if (count > 0) & (expert < EXPERTS):
        last = -1
        lines = expert.to(tl.int64) * SIDE + held
        for start in range(0, count, BLOCK_R):
            pair, last = pairs_of_tile(match, last, count - start, BLOCK_P, BLOCK_R)
            has_row = start + tl.arange(0, BLOCK_R) < count
            at = pair.to(tl.int64) * INNER
            if IS_SCALED:
                sums = scaled_products(x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K)
            else:
                sums = many_products(
                    x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K, IS_CODED
                )
            inside = has_row[None, :] & (n < SIDE)[:, None]
            place_out = outputs + pair.to(tl.int64)[None, :] * SIDE + n[:, None]
            tl.store(place_out, sums.to(outputs.dtype.element_ty), mask=inside)
    if is_last_arrival(counters + block, places):
        for start in range(0, rows, BLOCK_SUM):
            row = (start + tl.arange(0, BLOCK_SUM)).to(tl.int64)[:, None]
            total = weighted_sums(
                outputs, ids, weights, row, row < rows, held[None, :], TOP_K, EXPERTS, SIDE
            )
            inside = (row < rows) & (n < SIDE)[None, :]
            summed = total.to(out.dtype.element_ty)
            tl.store(out + row * SIDE + n[None, :], summed, mask=inside)
            if SQUARE_COLUMNS > 0:
                begin = block * BLOCK_N
                store_squares(squares, summed, begin, row, rows, SIDE, SQUARE_COLUMNS)
        signal_if_last(arrivals, tl.num_programs(0) * (SHARED_LINES + 1), peers, PEERS)
