"""What the kernels in CuTe DSL do, step for step, in torch: the interpreter that CuTe DSL has not.

It takes a `CuteLaunch` as a GPU would: the same parts of the input columns, the same vectors for
each lane (`cute_tiles.py`, which the kernels use, too), operands and sums of an instruction where
PTX's documentation has them, one rounding to fp32 an instruction, parts in their order, and the
same bf16 roundings. In which order an instruction adds its 16 products is not documented; here
their sum is exact. Lanes read by address, as a kernel does: beside a tensor is what lies in its
memory there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdecode.kernels.common.cute_launch import CuteLaunch
from kdecode.kernels.common.cute_tiles import (
    CHUNK,
    INPUT_STRIDES,
    LANES,
    MAX_ROWS,
    MMA_K,
    MMA_M,
    MMA_N,
    STEP_STRIDE,
    STEPS,
    VECTOR,
    WEIGHT_STRIDES,
    ProductSizes,
    lane_column,
    lane_row,
    sum_place,
)

LANE = torch.arange(LANES)
# PTX, m16n8k16: a lane is number g = lane / 4 of its group and number q = lane % 4 in it.
G, Q = LANE // 4, LANE % 4


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run so where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(CuteLaunch, "run", run)


def run(launch: CuteLaunch) -> None:
    """In place of `CuteLaunch.run`."""
    arguments: dict[str, Any] = dict(launch.arguments)
    rows = arguments["rows"]
    y = product(arguments["x"], arguments["weight"], rows, launch.sizes)[:rows].bfloat16()
    if "out" in arguments:
        arguments["out"].copy_(y)
        return
    prefix, old = arguments["prefix"], arguments["prefix"].clone()
    arguments["delta_out"].copy_(y)
    if launch.options["push"]:
        arguments["pushed"].copy_(old)
        prefix.copy_(y)
    else:
        prefix.copy_((old.float() + y.float()).bfloat16())


def product(x: Tensor, weight: Tensor, rows: int, sizes: ProductSizes) -> Tensor:
    """[MAX_ROWS, columns] fp32: the parts of every block in their order."""
    total = part_sums(x, weight, rows, sizes, 0)
    for part in range(1, sizes.parts):
        total = total + part_sums(x, weight, rows, sizes, part)
    # [blocks, columns of a block, rows]
    return total.flatten(0, 1)[: sizes.columns].t()


def part_sums(x: Tensor, weight: Tensor, rows: int, sizes: ProductSizes, part: int) -> Tensor:
    """[blocks, columns of a block, MAX_ROWS] fp32 of one warp of each cluster."""
    tiles = sizes.tile.tiles
    begin = part * sizes.part_columns
    end = min(begin + sizes.part_columns, sizes.inner)
    block, number = torch.arange(sizes.blocks), torch.arange(2 * tiles)
    n = block[:, None, None] * sizes.block_n + number[:, None] * (MMA_M // 2) + lane_row(LANE)
    n = n.clamp(max=sizes.columns - 1)
    # By tile: [blocks, tiles, lanes, pair of rows 8 apart]
    n = n.view(sizes.blocks, tiles, 2, LANES).transpose(2, 3)
    # Of each lane, (pair, half): [blocks, tiles, lanes, 4]
    sums = torch.zeros(sizes.blocks, tiles, LANES, 2, 2)
    for start in range(begin, begin + sizes.rounds * sizes.block_columns, CHUNK):
        column = start + lane_column(LANE)
        held = torch.clamp(column, max=end - VECTOR)[:, None] + torch.arange(VECTOR)
        # The second vector behind the first.
        weights = _at(weight, n[..., None] * sizes.inner + held[:, None]).flatten(-2)
        row = lane_row(LANE)
        inputs = _at(x, row.clamp(max=rows - 1)[:, None] * sizes.inner + held)
        inside = (row < rows) & (column < end)
        inputs = torch.where(inside[:, None], inputs, torch.zeros_like(inputs))
        for step in range(STEPS):
            exact = left_operand(weights, step).double() @ right_operand(inputs, step).double()
            sums = (sums.double() + sums_of_lanes(exact)).float()
    return columns_of_block(sums)


def left_operand(weights: Tensor, step: int) -> Tensor:
    """Lanes' numbers of W [..., LANES, 2 * VECTOR] -> the instruction's A [..., MMA_M, MMA_K]."""
    a = weights.new_full((*weights.shape[:-2], MMA_M, MMA_K), torch.nan)
    for first in range(2):
        for half in range(2):
            for second in range(2):
                modes = (first, half, second)
                at = sum(m * s for m, s in zip(modes, WEIGHT_STRIDES, strict=True))
                row, column = G + 8 * half, 2 * Q + first + 8 * second
                a[..., row, column] = weights[..., LANE, at + step * STEP_STRIDE]
    return a


def right_operand(inputs: Tensor, step: int) -> Tensor:
    """Lanes' numbers of x [LANES, VECTOR] -> the instruction's B [MMA_K, MMA_N]."""
    b = inputs.new_full((MMA_K, MMA_N), torch.nan)
    for first in range(2):
        for second in range(2):
            modes = (first, second)
            at = sum(m * s for m, s in zip(modes, INPUT_STRIDES, strict=True))
            b[2 * Q + first + 8 * second, G] = inputs[LANE, at + step * STEP_STRIDE]
    return b


def sums_of_lanes(c: Tensor) -> Tensor:
    """The instruction's C [..., MMA_M, MMA_N] -> what each lane holds of it, [..., LANES, 2, 2]."""
    held = c.new_empty(*c.shape[:-2], LANES, 2, 2)
    for pair in range(2):
        for half in range(2):
            held[..., pair, half] = c[..., G + 8 * half, 2 * Q + pair]
    return held


def columns_of_block(sums: Tensor) -> Tensor:
    """Where each lane leaves its sums in shared memory: [blocks, columns, rows]."""
    blocks, tiles = sums.shape[:2]
    collected = sums.new_full((blocks, tiles, MMA_M, MAX_ROWS), torch.nan)
    for pair in range(2):
        for half in range(2):
            column, row = sum_place(LANE, pair, half)
            collected[:, :, column, row] = sums[..., pair, half]
    return collected.flatten(1, 2)


def _at(tensor: Tensor, index: Tensor) -> Tensor:
    """Numbers behind a tensor's first one, whether they are its own or not."""
    offset = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - offset
    return torch.as_strided(tensor, (size,), (1,), offset)[index]
