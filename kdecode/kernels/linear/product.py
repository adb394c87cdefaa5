"""``x W^T`` for any packed matrix and any number of rows: which product is chosen when it is made.

"rows" matrices are torch's `F.linear`, tiles the native product; on another device than a CPU tiles
are unpacked for torch. fp32 accumulation, rounded once. Uses no native library for "rows", so such
a plan does not need one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.common.matrix import TILE_ROWS, Matrix
from kdecode.kernels.linear.unpack import unpack_rows

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ProductSettings:
    """What the products of one plan have in common. isa: of the native ones; None is the best."""

    device: str
    isa: str | None = None


def make_linear(
    matrix: Matrix, settings: ProductSettings, out_dtype: torch.dtype = torch.bfloat16
) -> Linear:
    """A function [R, cols] bf16 -> [R, rows] in ``out_dtype`` (fp32: the unrounded sums)."""
    if matrix.format == "rows":
        return _rows_linear(matrix.data, out_dtype)
    if matrix.data.device.type != "cpu":
        return lambda x: _rows_linear(unpack_rows(matrix), out_dtype)(x)
    # The native library is needed by packed formats only.
    from kdecode.kernels.linear.native import tiles_linear

    isa = settings.isa
    return lambda x: tiles_linear(x.contiguous(), matrix, out_dtype, isa)


def make_head_linear(matrix: Matrix, heads: int, settings: ProductSettings) -> Linear:
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
        out = tiles_linear_grouped(by_head, matrices, [rows] * heads, isa=settings.isa)
        return out.view(heads, rows, width).transpose(0, 1)

    return run


def unpack(matrix: Matrix, isa: str | None = None) -> Tensor:
    """Row-major bf16 [rows, cols]; the matrix's own data in "rows"."""
    if matrix.format == "rows" or matrix.data.device.type != "cpu":
        return unpack_rows(matrix)
    from kdecode.kernels.linear.native import unpack_tiles

    rows = torch.empty(matrix.rows, matrix.cols, dtype=torch.bfloat16)
    unpack_tiles(matrix, rows, isa)
    return rows


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
