"""Packed weight matrices: what every linear kernel reads.

A `Matrix` is W [rows, cols] in one of seven formats (see ARCHITECTURE.md, "Packed weights", and
``native.h`` for the byte order). Packing is exact: `to_rows` gives back the same bf16 bits, and for
MXFP4 the same codes and scales; integers, in `integers.py`, are the exception. Knows nothing of
models.

Packed weights live in anonymous memory advised for huge pages (`empty_huge`); the ``out`` of the
packing functions lets many matrices share one such block.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP

MatrixFormat = Literal[
    "rows", "tiles", "tiles12", "mxfp4_tiles", "mxfp4_rows", "int8_tiles", "int4_tiles"
]
# Formats whose rows are one after the other: gate rows, then up rows.
ROW_FORMATS = ("rows", "mxfp4_rows")
# Bits of a weight's code in the formats whose weights differ from what was packed.
INTEGER_BITS = {"int8_tiles": 8, "int4_tiles": 4}

TILE_ROWS = 16
# Values of the E2M1 codes 0 to 7; code c + 8 is minus code c.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Bytes of codes that one tile has of one group of columns.
GROUP_BYTES = TILE_ROWS * MXFP4_GROUP // 2
# Of a tile of "tiles12".
PACKED12_HEADER_BYTES = 64
# Scale byte of 2^0, that rows without weights get.
UNIT_SCALE = 127

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Matrix:
    """W [rows, cols].

    format "rows": ``data`` bf16 [rows, cols]. "tiles": ``data`` bf16 [ceil(rows/16), cols/2, 16,
    2], missing rows zero. "tiles12": the same in 12 bits a weight (`packed12.pack12`), ``data``
    uint8 [ceil(rows/16), 64 + 24 * cols], ``corrections`` int32 [*], which matrices that are parts
    of one may share. "mxfp4_tiles": ``data`` uint8 [ceil(rows/16), cols/32, 256], ``scales``
    uint8 [ceil(rows/16), cols/32, 16]; missing rows have code 0 and scale 127. "mxfp4_rows": the
    checkpoint's own bytes, ``data`` uint8 [rows, cols/2], the even column in the low nibble,
    ``scales`` uint8 [rows, cols/32]. "int8_tiles", "int4_tiles": ``data`` uint8 [ceil(rows/16),
    cols/32, 512 or 256], ``scales`` bf16 as in "mxfp4_tiles"; missing rows are zero
    (`integers.py`).
    """

    format: MatrixFormat
    rows: int
    cols: int
    data: Tensor
    scales: Tensor | None = None
    corrections: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.data, self.scales, self.corrections)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def empty_huge(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, 64-byte aligned; from 2 MiB up on huge pages where there are any.

    Packed weights are streamed once a token: with 4 KiB pages, address translation costs up to a
    tenth of the bandwidth.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Private: shared anonymous memory is not served from huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    block = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=flags)
    block.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(block, dtype=torch.uint8, count=1).data_ptr()
    offset = -start % _HUGE_PAGE_BYTES
    flat = torch.frombuffer(block, dtype=dtype, count=math.prod(shape), offset=offset)
    return flat.view(shape)


def num_tiles(rows: int) -> int:
    """Tiles of a matrix of so many rows."""
    return -(-rows // TILE_ROWS)


def pack12_shape(rows: int, cols: int) -> tuple[int, int]:
    """Of the data of a matrix in "tiles12": 12 bits a weight and the headers."""
    return num_tiles(rows), PACKED12_HEADER_BYTES + cols * TILE_ROWS * 3 // 2


def pack_rows(weights: Sequence[Tensor], out: Tensor | None = None) -> Matrix:
    """Copies of bf16 [*, cols], one below the other, in format "rows".

    out: bf16 [rows, cols] to fill instead of new memory.
    """
    rows = 0
    for weight in weights:
        _check_bf16(weight)
        rows += weight.shape[0]
    shape = (rows, weights[0].shape[1])
    data = empty_huge(shape, torch.bfloat16) if out is None else _checked_out(out, shape)
    torch.cat(list(weights), out=data)
    return Matrix("rows", *shape, data)


def pack_tiles(weight: Tensor, out: Tensor | None = None) -> Matrix:
    """bf16 [rows, cols], cols even, in format "tiles".

    out: bf16 [tiles, cols/2, 16, 2] to fill instead of new memory; any stride between tiles.
    """
    _check_bf16(weight)
    rows, cols = weight.shape
    if cols % 2:
        raise ValueError(f"Tiles hold pairs of columns; the matrix is [{rows}, {cols}].")
    shape = (num_tiles(rows), cols // 2, TILE_ROWS, 2)
    data = empty_huge(shape, torch.bfloat16) if out is None else _checked_out(out, shape)
    # A pair of neighbouring columns is one 32-bit number.
    pairs = weight.contiguous().view(torch.int32)  # [rows, cols/2]
    lines = data.view(torch.int32).squeeze(-1)  # [tiles, cols/2, 16]
    whole = rows // TILE_ROWS
    blocks = pairs[: whole * TILE_ROWS].view(whole, TILE_ROWS, cols // 2)
    lines[:whole].copy_(blocks.transpose(1, 2))
    rest = rows - whole * TILE_ROWS
    if rest:
        lines[whole].zero_()
        lines[whole, :, :rest].copy_(pairs[whole * TILE_ROWS :].t())
    return Matrix("tiles", rows, cols, data)


def pack_mxfp4_tiles(
    packed: Tensor, scale: Tensor, out: tuple[Tensor, Tensor] | None = None
) -> Matrix:
    """Codes U8 [rows, cols/2] and scales U8 [rows, cols/32] in format "mxfp4_tiles".

    out: (data, scales) to fill instead of new memory; any stride between tiles.
    """
    rows, groups = _check_mxfp4(packed, scale)
    cols = groups * MXFP4_GROUP
    data_shape = (num_tiles(rows), groups, GROUP_BYTES)
    scale_shape = (num_tiles(rows), groups, TILE_ROWS)
    if out is None:
        data, scales = empty_huge(data_shape, torch.uint8), empty_huge(scale_shape, torch.uint8)
    else:
        data, scales = _checked_out(out[0], data_shape), _checked_out(out[1], scale_shape)
    words = _padded(_even_then_odd(packed.contiguous().view(_word())), 0)
    blocks = words.view(-1, TILE_ROWS, groups, 4).permute(0, 2, 3, 1)
    data.view(_word()).view(-1, groups, 4, TILE_ROWS).copy_(blocks)
    padded_scale = _padded(scale, UNIT_SCALE).view(-1, TILE_ROWS, groups)
    scales.copy_(padded_scale.transpose(1, 2))
    return Matrix("mxfp4_tiles", rows, cols, data, scales)


def pack_mxfp4_rows(
    weights: Sequence[tuple[Tensor, Tensor]], out: tuple[Tensor, Tensor] | None = None
) -> Matrix:
    """Copies of (codes, scales), one below the other, in format "mxfp4_rows".

    out: (data, scales) to fill instead of new memory.
    """
    for packed, scale in weights:
        _check_mxfp4(packed, scale)
    rows, half = sum(packed.shape[0] for packed, _ in weights), weights[0][0].shape[1]
    shapes = (rows, half), (rows, 2 * half // MXFP4_GROUP)
    if out is None:
        out = empty_huge(shapes[0], torch.uint8), empty_huge(shapes[1], torch.uint8)
    data, scales = (_checked_out(*pair) for pair in zip(out, shapes, strict=True))
    torch.cat([packed for packed, _ in weights], out=data)
    torch.cat([scale for _, scale in weights], out=scales)
    return Matrix("mxfp4_rows", rows, 2 * half, data, scales)


def to_rows(matrix: Matrix) -> Tensor:
    """bf16 [rows, cols]; MXFP4 is dequantised, exactly."""
    rows, cols = matrix.rows, matrix.cols
    if matrix.format == "rows":
        return matrix.data
    if matrix.format == "tiles12":
        matrix = _plain_tiles(matrix)
    if matrix.format == "tiles":
        lines = matrix.data.contiguous().view(torch.int32).squeeze(-1)  # [tiles, cols/2, 16]
        pairs = torch.empty(lines.shape[0], TILE_ROWS, cols // 2, dtype=torch.int32)
        pairs.copy_(lines.transpose(1, 2))
        return pairs.view(-1, cols // 2)[:rows].view(torch.bfloat16)
    if matrix.format in INTEGER_BITS:
        from kdecode.kernels.common.integers import dequantise_integers

        return dequantise_integers(matrix)
    codes, scale = to_mxfp4(matrix)
    table = _code_table().to(codes.device)
    low, high = table[(codes & 15).int()], table[(codes >> 4).int()]
    values = torch.stack([low, high], dim=-1).view(rows, cols // MXFP4_GROUP, MXFP4_GROUP)
    factors = (scale.int() << 23).view(torch.float32)
    return (values * factors.unsqueeze(-1)).view(rows, cols).to(torch.bfloat16)


def to_mxfp4(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """(codes U8 [rows, cols/2], scales U8 [rows, cols/32]) of a matrix of MXFP4."""
    if matrix.format not in ("mxfp4_tiles", "mxfp4_rows") or matrix.scales is None:
        raise ValueError(
            f"Only mxfp4_tiles and mxfp4_rows hold MXFP4 codes; this matrix is in {matrix.format}."
        )
    if matrix.format == "mxfp4_rows":
        return matrix.data, matrix.scales
    rows, groups = matrix.rows, matrix.cols // MXFP4_GROUP
    blocks = matrix.data.contiguous().view(_word()).view(-1, groups, 4, TILE_ROWS)
    words = blocks.permute(0, 3, 1, 2).reshape(-1, groups * 4)[:rows].contiguous()
    scale = matrix.scales.transpose(1, 2).reshape(-1, groups)[:rows].contiguous()
    return _column_order(words).view(torch.uint8), scale


def _plain_tiles(matrix: Matrix) -> Matrix:
    """A matrix in "tiles12", in "tiles"."""
    tiles = matrix.data.contiguous()
    table = tiles[:, :TILE_ROWS]
    blocks = tiles[:, PACKED12_HEADER_BYTES:].view(len(tiles), -1, 3, 64)
    codes = blocks[:, :, 2]
    codes = torch.stack([codes & 15, codes >> 4], dim=2)  # [tiles, blocks, pairs of lines, 64]
    high = table.gather(1, codes.view(len(tiles), -1).long()).view_as(codes)
    weights = (high.int() << 8 | blocks[:, :, :2].int()).to(torch.int16)
    # Of the 64 weights of two lines: an eighth of each line in turn.
    lines = weights.view(len(tiles), -1, 2, 4, 2, 8).transpose(3, 4).reshape(len(tiles), -1, 32)
    if matrix.corrections is not None and matrix.corrections.numel():
        _correct(lines, tiles, matrix.corrections)
    shape = (len(tiles), matrix.cols // 2, TILE_ROWS, 2)
    return Matrix("tiles", matrix.rows, matrix.cols, lines.view(shape).view(torch.bfloat16))


def _correct(lines: Tensor, tiles: Tensor, corrections: Tensor) -> None:
    """Sets the high bytes that are in no table. lines: int16 [tiles, cols/2, 32], changed."""
    first = tiles[:, 16:24].contiguous().view(torch.int64).flatten()
    count = tiles[:, 24:28].contiguous().view(torch.int32).flatten().long()
    tile = torch.arange(len(tiles)).repeat_interleave(count)
    start = (first - (count.cumsum(0) - count)).repeat_interleave(count)
    used = corrections[torch.arange(len(tile)) + start]
    # Below bit 15 there are two bits of line, five of the number in it, and the true high byte.
    block, line = used >> 15 & 0x1FFFF, used >> 13 & 3
    place = (tile, (block * 4 + line).long(), (used >> 8 & 31).long())
    lines[place] = (lines[place] & 0xFF) | ((used & 0xFF) << 8).to(torch.int16)


def _check_bf16(weight: Tensor) -> None:
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        raise ValueError(
            f"Matrices are packed from two-dimensional bf16; this one is {list(weight.shape)} "
            f"{weight.dtype}."
        )


def _check_mxfp4(packed: Tensor, scale: Tensor) -> tuple[int, int]:
    """Rows, and groups of a row."""
    rows, cols = packed.shape[0], packed.shape[1] * 2
    if cols % MXFP4_GROUP or tuple(scale.shape) != (rows, cols // MXFP4_GROUP):
        raise ValueError(
            f"MXFP4 needs one scale for {MXFP4_GROUP} columns; the codes are [{rows}, {cols}], the "
            f"scales {list(scale.shape)}."
        )
    return rows, cols // MXFP4_GROUP


def _checked_out(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(out.shape) != shape:
        raise ValueError(f"The packed matrix is {list(shape)}; out is {list(out.shape)}.")
    return out


def _word() -> torch.dtype:
    """32-bit words of 8 codes; the formats are little-endian."""
    if sys.byteorder != "little":
        raise RuntimeError("The packed formats need a little-endian machine.")
    return torch.int32


def _padded(rows: Tensor, fill: int) -> Tensor:
    missing = -rows.shape[0] % TILE_ROWS
    if not missing:
        return rows
    return torch.cat([rows, rows.new_full((missing, rows.shape[1]), fill)])


def _swap(words: Tensor, mask: int, shift: int) -> None:
    """Exchanges, in place, the bits of ``mask`` with those ``shift`` above them."""
    difference = words >> shift
    difference ^= words
    difference &= mask
    words ^= difference
    difference <<= shift
    words ^= difference


def _even_then_odd(words: Tensor) -> Tensor:
    """8 codes of a row, in column order -> the 4 of even columns below the 4 of odd ones."""
    words = words.clone()
    _swap(words, 0x00F000F0, 4)
    _swap(words, 0x0000FF00, 8)
    return words


def _column_order(words: Tensor) -> Tensor:
    """The inverse of `_even_then_odd`."""
    words = words.clone()
    _swap(words, 0x0000FF00, 8)
    _swap(words, 0x00F000F0, 4)
    return words


def _code_table() -> Tensor:
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    return torch.cat([magnitudes, -magnitudes])
