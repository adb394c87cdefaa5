"""Packed matrices back to row-major bf16 by torch operators: any device, no native library.

What a GPU uses for MXFP4 experts; on a CPU `native.unpack_tiles` does the same far faster. MXFP4 is
dequantised exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common.matrix import INTEGER_BITS, TILE_ROWS, Matrix, to_rows

_GROUP = 32  # columns that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_rows(matrix: Matrix) -> Tensor:
    """[rows, cols] bf16; the matrix's own data when that is row-major already."""
    if matrix.format == "rows":
        return matrix.data
    if matrix.format in ("tiles12", "mxfp4_rows") or matrix.format in INTEGER_BITS:
        return to_rows(matrix)
    if matrix.format == "tiles":
        rows = matrix.data.permute(0, 2, 1, 3).reshape(-1, matrix.cols)
        return rows[: matrix.rows]
    return _unpack_mxfp4(matrix)[: matrix.rows]


def _unpack_mxfp4(matrix: Matrix) -> Tensor:
    """[rows rounded up to tiles, cols]."""
    if matrix.scales is None:
        raise ValueError(f"An MXFP4 matrix of {matrix.rows} rows has no scales.")
    data = matrix.data
    num_tiles, num_groups = data.shape[:2]
    codes = torch.stack((data & 15, data >> 4), dim=-1).long()
    # Low nibble first, a 16-bit word holds every second column, see native.h.
    codes = codes.view(num_tiles, num_groups, 4, TILE_ROWS, 2, 4)  # block, row, parity, nibble
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=data.device)
    values = table[codes].permute(0, 3, 1, 2, 5, 4)  # tile, row, group, block, nibble, parity
    values = values.reshape(num_tiles, TILE_ROWS, num_groups, _GROUP)
    scale = matrix.scales.view(torch.float8_e8m0fnu).float().transpose(1, 2)  # tile, row, group
    return (values * scale.unsqueeze(-1)).to(torch.bfloat16).reshape(-1, matrix.cols)
