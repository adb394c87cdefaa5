"""The experts of any number of rows: tiles of pairs of one expert, from the pairs sorted by expert.

Three launches (gate and up, down, weighted sums) behind a sort, all on the device: how many tiles
there are is known to nobody else, so the grid has a place for as many as there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.expert_launch import (
    BF16,
    down_arguments,
    expert_side,
    grouped_tile,
    up_arguments,
)
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.triton_expert_down import Choice
from kdecode.kernels.common.triton_expert_up import gate_up_lines
from kdecode.kernels.common.triton_experts import many_products, weighted_sums
from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import gated, round_bf16, to_bf16

_LEAST_ROWS, _MOST_ROWS = 16, 128
_SUM_COLUMNS = 1024


@dataclass(frozen=True)
class Tiles:
    """Pairs by expert. order: their numbers int32 [P]; bounds int32 [E + 1], where in it each
    expert's begin; ends int32 [E], tiles of ``rows`` pairs up to and with each expert's. Pairs of
    ids that are no expert are in no tile. limit: how many tiles there can be."""

    order: Tensor
    bounds: Tensor
    ends: Tensor
    rows: int
    limit: int


def sort_pairs(ids: Tensor, num_experts: int) -> Tiles:
    """ids [R, N] int32. Without a word to the host."""
    pairs = ids.numel()
    rows = _LEAST_ROWS
    while rows < _MOST_ROWS and rows * num_experts < pairs:
        rows *= 2
    by_expert, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    bounds = torch.searchsorted(by_expert, numbers, out_int32=True)
    counts = bounds[1:] - bounds[:-1]
    ends = ((counts + (rows - 1)) // rows).cumsum(0, dtype=torch.int32)
    limit = min(pairs, pairs // rows + num_experts)
    return Tiles(order.to(torch.int32), bounds, ends, rows, limit)


def tile_launches(
    config: ModelConfig,
    arch: str,
    stack: ExpertStack,
    source: Tensor,
    choice: Choice,
    out: Tensor,
) -> Iterator[Launch]:
    """source [R, side] bf16 -> out [R, side], to be run one after the other.

    out: bf16, or fp32 for sums of which nothing is rounded, nor the outputs of single experts.
    """
    moe, side, rows = config.moe, expert_side(config), source.shape[0]
    width, slots = moe.expert_width, (rows, moe.top_k)
    ids = tensor_for(choice.ids, torch.int32, slots, name="route_ids")
    tiles = sort_pairs(ids, moe.num_experts)
    product = source.new_empty(*slots, width)
    outputs = source.new_empty(*slots, side, dtype=out.dtype)
    common = {"order": tiles.order, "bounds": tiles.bounds, "ends": tiles.ends}
    constants = {
        "TOP_K": moe.top_k,
        "EXPERTS": moe.num_experts,
        "IS_CODED": stack.down_scales is not None,
        "BLOCK_E": triton.next_power_of_2(moe.num_experts),
        "BLOCK_R": tiles.rows,
    }
    up = {
        **common,
        "x": tensor_for(source, BF16, (rows, side), name="the experts' input"),
        **up_arguments(config, stack),
        "out": product,
        "beta": config.activation.beta or 0.0,
        "bound": config.activation.linear_beta or 0.0,
    }
    more = {"INNER": side, "WIDTH": width, "IS_SITU": config.activation.kind == "situ"}
    yield _tiled(expert_up_tiles, arch, tiles, up, constants | more, side, 2 * width)
    down = {**common, "x": product, **down_arguments(config, stack), "out": outputs}
    more = {"INNER": width, "SIDE": side}
    yield _tiled(expert_down_tiles, arch, tiles, down, constants | more, width, side)
    sums = {
        "outputs": outputs,
        "ids": ids,
        "weights": tensor_for(choice.weights, torch.float32, slots, name="route_weights"),
        "out": tensor_for(out, out.dtype, (rows, side), name="expert_sum"),
    }
    sizes = {"TOP_K": moe.top_k, "EXPERTS": moe.num_experts, "SIDE": side}
    block = min(_SUM_COLUMNS, triton.next_power_of_2(side))
    grid = (rows, divide_up(side, block))
    yield Launch(expert_sums, grid, sums, {**sizes, "BLOCK_N": block})


def _tiled(
    kernel: Any,
    arch: str,
    tiles: Tiles,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    inner: int,
    columns: int,
) -> Launch:
    is_coded = constants["IS_CODED"]
    tile = grouped_tile(kernel.fn.__name__, arch, inner, columns, is_coded, tiles.rows)
    sizes = {**constants, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    grid = (divide_up(columns, tile.block_n), tiles.limit)
    return Launch(kernel, grid, arguments, sizes, tile.warps, tile.stages)


@triton.jit
def _tile(
    order,
    bounds,
    ends,
    number,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A tile's expert (EXPERTS for a place without one), its pairs [BLOCK_R], which there are."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends + e, mask=e < EXPERTS, other=2147483647)
    expert = tl.sum((end <= number).to(tl.int32), axis=0)
    before = tl.max(tl.where(end <= number, end, 0), axis=0)
    is_tile = expert < EXPERTS
    first = tl.load(bounds + expert, mask=is_tile, other=0) + (number - before) * BLOCK_R
    last = tl.load(bounds + expert + 1, mask=is_tile, other=0)
    place = first + tl.arange(0, BLOCK_R)
    has_row = is_tile & (place < last)
    return expert, tl.load(order + place, mask=has_row, other=0), has_row


@triton.jit
def expert_up_tiles(
    x,
    order,
    bounds,
    ends,
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
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    number = tl.program_id(1)
    expert, pair, has_row = _tile(order, bounds, ends, number, EXPERTS, BLOCK_E, BLOCK_R)
    if expert < EXPERTS:
        lines, first = gate_up_lines(block, expert, WIDTH, BLOCK_N)
        at = (pair // TOP_K).to(tl.int64) * INNER
        sums = many_products(x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K, IS_CODED)
        halves = tl.permute(tl.reshape(sums, [BLOCK_N // 2, 2, BLOCK_R]), (0, 2, 1))
        gate, up = tl.split(halves)
        values = gated(round_bf16(gate), round_bf16(up), beta, bound, IS_SITU)
        n = (first + tl.arange(0, BLOCK_N // 2))[:, None]
        inside = has_row[None, :] & (n < WIDTH)
        tl.store(out + pair.to(tl.int64)[None, :] * WIDTH + n, to_bf16(values), mask=inside)


@triton.jit
def expert_down_tiles(
    x,
    order,
    bounds,
    ends,
    data,
    scales,
    out,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    SIDE: tl.constexpr,
    IS_CODED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    number = tl.program_id(1)
    expert, pair, has_row = _tile(order, bounds, ends, number, EXPERTS, BLOCK_E, BLOCK_R)
    if expert < EXPERTS:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        lines = expert.to(tl.int64) * SIDE + tl.minimum(n, SIDE - 1)
        at = pair.to(tl.int64) * INNER
        sums = many_products(x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K, IS_CODED)
        inside = has_row[None, :] & (n < SIDE)[:, None]
        place_out = out + pair.to(tl.int64)[None, :] * SIDE + n[:, None]
        tl.store(place_out, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expert_sums(
    outputs,
    ids,
    weights,
    out,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    held = tl.minimum(n, SIDE - 1)
    total = weighted_sums(outputs, ids, weights, row, row >= 0, held, TOP_K, EXPERTS, SIDE)
    tl.store(out + row * SIDE + n, total.to(out.dtype.element_ty), mask=n < SIDE)
