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
        _fill_byte_tiles(codes, data)
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
    groups = matrix.data.shape[1]
    if INTEGER_BITS[matrix.format] == 4:
        codes = _nibbles(matrix)
        codes = (codes ^ 8) - 8
    else:
        codes = _bytes(matrix)
    scale = matrix.scales.transpose(1, 2).reshape(-1, groups)[: matrix.rows].float()
    values = codes.view(matrix.rows, groups, _GROUP).float() * scale.unsqueeze(-1)
    return values.view(matrix.rows, matrix.cols).bfloat16()


def _fill_byte_tiles(codes: Tensor, data: Tensor) -> None:
    """Codes int8 [rows, cols] to the byte order of "tiles", [tiles, groups, 512]."""
    rows, pairs = codes.shape[0], codes.shape[1] // 2
    # A pair of neighbouring columns is one 16-bit number.
    padded = torch.zeros(data.shape[0] * TILE_ROWS, pairs, dtype=torch.int16)
    padded[:rows] = codes.view(torch.int16)
    lines = data.view(torch.int16).view(-1, pairs, TILE_ROWS)
    lines.copy_(padded.view(-1, TILE_ROWS, pairs).transpose(1, 2))


def _bytes(matrix: Matrix) -> Tensor:
    """The inverse of `_fill_byte_tiles`, int8 [rows, cols]."""
    lines = matrix.data.contiguous().view(torch.int16).view(-1, matrix.cols // 2, TILE_ROWS)
    rows = lines.transpose(1, 2).reshape(-1, matrix.cols // 2)[: matrix.rows]
    return rows.contiguous().view(torch.int8)


def _nibble_tiles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 int8 [rows, cols] in the byte order of MXFP4 tiles, [tiles, groups, 256]."""
    codes = codes.to(torch.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    no_scales = packed.new_zeros(packed.shape[0], codes.shape[1] // _GROUP)
    return pack_mxfp4_tiles(packed, no_scales).data


def _nibbles(matrix: Matrix) -> Tensor:
    """The inverse of `_nibble_tiles`, int16 [rows, cols]."""
    no_scales = matrix.data.new_zeros(*matrix.data.shape[:2], TILE_ROWS)
    codes = Matrix("mxfp4_tiles", matrix.rows, matrix.cols, matrix.data, no_scales)
    packed, _ = to_mxfp4(codes)
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(matrix.rows, -1).to(torch.int16)
