"""``x W^T`` for any packed matrix and any number of rows: which product is chosen when it is made.

"rows" matrices are torch's `F.linear`. Tiles are the native product up to `NATIVE_ROWS` rows; for
more they are unpacked, a block at a time, into scratch that all products of a plan share. fp32
accumulation, rounded once. Uses no native library for "rows", so such a plan does not need one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.common.matrix import TILE_ROWS, Matrix
from kdecode.kernels.linear.unpack import unpack_rows

Linear = Callable[[Tensor], Tensor]

# Rows up to which native passes over a matrix, 8 rows each, cost less than unpacking it for torch.
NATIVE_ROWS = 128
_BLOCK_BYTES = 4 * 2**20


class Scratch:
    """What the products of one plan share: a bf16 buffer and the native instruction set.

    The buffer grows to the largest use; each use overwrites the last one's. isa None: the best.
    """

    def __init__(self, device: str, isa: str | None = None) -> None:
        self.device = device
        self.isa = isa
        self._data = torch.empty(0, dtype=torch.bfloat16, device=device)

    def take(self, rows: int, cols: int) -> Tensor:
        """An uninitialised [rows, cols]."""
        if rows * cols > self._data.numel():
            self._data = torch.empty(rows * cols, dtype=torch.bfloat16, device=self.device)
        return self._data[: rows * cols].view(rows, cols)


def make_linear(
    matrix: Matrix, scratch: Scratch, out_dtype: torch.dtype = torch.bfloat16
) -> Linear:
    """A function [R, cols] bf16 -> [R, rows] in ``out_dtype`` (fp32: the unrounded sums)."""
    if matrix.format == "rows":
        return _rows_linear(matrix.data, out_dtype)
    if matrix.data.device.type != "cpu":
        return lambda x: _rows_linear(unpack_rows(matrix), out_dtype)(x)
    # The native library is needed by packed formats only.
    from kdecode.kernels.linear.native import tiles_linear

    def run(x: Tensor) -> Tensor:
        if x.shape[0] <= NATIVE_ROWS:
            return tiles_linear(x.contiguous(), matrix, out_dtype, scratch.isa)
        return unpacked_linear(x, matrix, scratch, out_dtype)

    return run


def make_head_linear(matrix: Matrix, heads: int, scratch: Scratch) -> Linear:
    """A block-diagonal product: [R, H, cols] -> [R, H, rows / H] bf16, head h by its own rows."""
    width = matrix.rows // heads
    is_sliceable = width % TILE_ROWS == 0 and matrix.data.device.type == "cpu"
    if matrix.format == "rows" or not is_sliceable:
        weight = unpack_rows(matrix).view(heads, width, matrix.cols)
        transposed = weight.transpose(1, 2)
        return lambda x: torch.bmm(x.transpose(0, 1), transposed).transpose(0, 1)
    from kdecode.kernels.linear.native import tiles_linear_grouped

    matrices = [_tile_block(matrix, head * width, (head + 1) * width) for head in range(heads)]

    def run(x: Tensor) -> Tensor:
        rows = x.shape[0]
        by_head = x.transpose(0, 1).reshape(heads * rows, matrix.cols).contiguous()
        if rows <= NATIVE_ROWS:
            out = tiles_linear_grouped(by_head, matrices, [rows] * heads, isa=scratch.isa)
            return out.view(heads, rows, width).transpose(0, 1)
        weight = unpack(matrix, scratch).view(heads, width, matrix.cols)
        out = torch.bmm(by_head.view(heads, rows, -1), weight.transpose(1, 2))
        return out.transpose(0, 1)

    return run


def unpack(matrix: Matrix, scratch: Scratch) -> Tensor:
    """A tile matrix in scratch, row-major bf16 [rows, cols]; valid until scratch is used again."""
    if matrix.data.device.type != "cpu":
        return unpack_rows(matrix)
    from kdecode.kernels.linear.native import unpack_tiles

    rows = scratch.take(matrix.rows, matrix.cols)
    unpack_tiles(matrix, rows, scratch.isa)
    return rows


def unpack_copy(matrix: Matrix, isa: str | None) -> Tensor:
    """Row-major bf16 [rows, cols] that stays valid; the matrix's own data in "rows"."""
    return matrix.data if matrix.format == "rows" else unpack(matrix, Scratch("cpu", isa))


def unpacked_linear(
    x: Tensor, matrix: Matrix, scratch: Scratch, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The product through torch, with at most `_BLOCK_BYTES` of the matrix unpacked at a time."""
    tiles_per_block = max(1, _BLOCK_BYTES // (TILE_ROWS * matrix.cols * 2))
    rows_per_block = tiles_per_block * TILE_ROWS
    if matrix.rows <= rows_per_block:
        return _rows_linear(unpack(matrix, scratch), out_dtype)(x)
    out = torch.empty(x.shape[0], matrix.rows, dtype=out_dtype, device=x.device)
    for begin in range(0, matrix.rows, rows_per_block):
        block = _tile_block(matrix, begin, min(matrix.rows, begin + rows_per_block))
        product = _rows_linear(unpack(block, scratch), out_dtype)(x)
        out[:, begin : begin + block.rows] = product
    return out


def _tile_block(matrix: Matrix, begin: int, end: int) -> Matrix:
    """Rows [begin, end) of a tile matrix, begin on a tile."""
    tiles = slice(begin // TILE_ROWS, -(-end // TILE_ROWS))
    scales = None if matrix.scales is None else matrix.scales[tiles]
    return replace(matrix, rows=end - begin, data=matrix.data[tiles], scales=scales)


def _rows_linear(weight: Tensor, out_dtype: torch.dtype) -> Linear:
    if out_dtype == torch.bfloat16:
        return lambda x: F.linear(x, weight)
    if weight.device.type == "cuda":
        return lambda x: torch.mm(x, weight.T, out_dtype=torch.float32)
    # torch on a CPU has no product of bf16 with an fp32 result; the only such matrix, the router,
    # is small enough for a second copy.
    wide = weight.float()
    return lambda x: F.linear(x.float(), wide)
