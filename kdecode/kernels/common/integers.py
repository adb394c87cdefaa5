"""bf16 weights as 8-bit or 4-bit integers with a scale for 32 columns: other weights, fewer bytes.

Owns the rounding, which is the one that llama.cpp's q8_0 and q4_0 have, but for the scale: bf16
here, fp16 there. 8 bits: the largest size of a group becomes 127. 4 bits: the number of the largest
size becomes -8, whatever its sign, so that all 16 codes are used. The byte order is ``native.h``'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP
from kdecode.kernels.common.matrix import (
    GROUP_BYTES,
    INTEGER_BITS,
    TILE_ROWS,
    Matrix,
    MatrixFormat,
    empty_huge,
    num_tiles,
    pack_mxfp4_tiles,
    to_mxfp4,
    to_rows,
)

_GROUP = MXFP4_GROUP
# Codes of h and l of 8 bits are in memory by turns, a line of each.
_LINE_BYTES = 64


def quantise_tiles(matrix: Matrix, target: MatrixFormat) -> Matrix | None:
    """A matrix in "tiles", rounded; None for one whose columns are not a multiple of 32."""
    if target not in INTEGER_BITS:
        raise ValueError(f"{target} is not one of {', '.join(INTEGER_BITS)}.")
    if matrix.format != "tiles":
        raise ValueError(f"Only bf16 tiles are quantised; this matrix is in {matrix.format}.")
    if matrix.cols % _GROUP:
        return None
    bits, tiles = INTEGER_BITS[target], num_tiles(matrix.rows)
    groups = matrix.cols // _GROUP
    data = empty_huge((tiles, groups, bits * 64), torch.uint8)
    scales = torch.zeros(tiles, groups, TILE_ROWS, dtype=torch.bfloat16)
    codes, found = round_rows(to_rows(matrix), bits)
    padded = torch.zeros(tiles * TILE_ROWS, groups, dtype=torch.bfloat16)
    padded[: matrix.rows] = found
    scales.copy_(padded.view(tiles, TILE_ROWS, groups).transpose(1, 2))
    if bits == 4:
        data.copy_(_nibble_tiles(codes & 15))
    else:
        lines = data.view(tiles, groups, -1, 2, _LINE_BYTES)
        for part, nibbles in enumerate((codes >> 4 & 15, codes & 15)):
            packed = _nibble_tiles(nibbles)
            lines[:, :, :, part] = packed.view(tiles, groups, -1, _LINE_BYTES)
    return Matrix(target, matrix.rows, matrix.cols, data, scales)


def round_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """bf16 [R, C] -> whole numbers int8 [R, C], scales bf16 [R, C/32]."""
    groups = rows.float().view(rows.shape[0], -1, _GROUP)
    if bits == 8:
        scale = groups.abs().amax(-1) / 127
    else:
        at = groups.abs().argmax(-1, keepdim=True)
        scale = groups.gather(-1, at).squeeze(-1) / -8
    scale = scale.bfloat16()
    # A group of zeros has scale 0 and codes 0.
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    codes = (groups * inverse.unsqueeze(-1)).round_().clamp_(low, high)
    return codes.to(torch.int8).view(rows.shape), scale


def dequantise_integers(matrix: Matrix) -> Tensor:
    """bf16 [rows, cols]: whole numbers times scales, rounded to the nearest."""
    assert matrix.scales is not None
    tiles, groups = matrix.data.shape[:2]
    if INTEGER_BITS[matrix.format] == 4:
        codes = _nibbles(matrix, matrix.data)
        codes = (codes ^ 8) - 8
    else:
        lines = matrix.data.view(tiles, groups, -1, 2, _LINE_BYTES)
        high, low = (
            _nibbles(matrix, lines[:, :, :, part].reshape(tiles, groups, GROUP_BYTES))
            for part in (0, 1)
        )
        codes = ((high ^ 8) - 8) * 16 + low
    scale = matrix.scales.transpose(1, 2).reshape(-1, groups)[: matrix.rows].float()
    values = codes.view(matrix.rows, groups, _GROUP).float() * scale.unsqueeze(-1)
    return values.view(matrix.rows, matrix.cols).bfloat16()


def _nibble_tiles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 int8 [rows, cols] in the byte order of MXFP4 tiles, [tiles, groups, 256]."""
    codes = codes.to(torch.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    no_scales = packed.new_zeros(packed.shape[0], codes.shape[1] // _GROUP)
    return pack_mxfp4_tiles(packed, no_scales).data


def _nibbles(matrix: Matrix, data: Tensor) -> Tensor:
    """The inverse of `_nibble_tiles`, int16 [rows, cols]."""
    no_scales = data.new_zeros(*data.shape[:2], TILE_ROWS)
    packed, _ = to_mxfp4(Matrix("mxfp4_tiles", matrix.rows, matrix.cols, data, no_scales))
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(matrix.rows, -1).to(torch.int16)
