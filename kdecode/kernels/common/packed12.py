"""bf16 tiles in 12 bits a weight, without loss: a quarter less of a trunk for a token to read.

A bf16 weight's high byte (sign and seven bits of exponent) takes few values within a tile of 16
rows, so it becomes a 4-bit index into a table of 16; the low byte stays as it is. Weights outside
the table are listed. Owns the decision whether a matrix packs well, and the proof that it came out
bit by bit as it was; the byte order is ``native.h``'s, the packing ``packed12.cpp``'s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import Matrix, empty_huge, pack12_shape
from kdecode.kernels.common.native import detect_isa, tiles

# Instruction sets whose kernels read packed tiles faster than plain ones (docs/perf-log.md).
FAST_ISAS = ("avx512",)
# Columns of a block.
COLUMNS = 8
# A correction interrupts the loop over its tile's blocks; more than one in so many weights is slow.
WEIGHTS_PER_CORRECTION = 2048
# Of the bytes of plain tiles: with very few columns the headers outweigh what packing saves.
LARGEST_SHARE = 0.9


def pack12(matrix: Matrix, isa: str | None = None, out: Tensor | None = None) -> Matrix | None:
    """The same weights in "tiles12"; None if they do not pack well.

    matrix: in "tiles". isa: unpacks for the proof, None for the best. out: uint8 `pack12_shape` to
    fill instead of new memory. Raises RuntimeError if the packed matrix is not the same bit by bit.
    """
    if matrix.format != "tiles":
        raise ValueError(f"Only bf16 tiles are packed; this matrix is in {matrix.format}.")
    shape = pack12_shape(matrix.rows, matrix.cols)
    # The widest matrix whose corrections can name its blocks.
    is_packable = matrix.cols % COLUMNS == 0 and matrix.cols <= COLUMNS << 17
    if not is_packable or math.prod(shape) > LARGEST_SHARE * matrix.num_bytes:
        return None
    data = empty_huge(shape, torch.uint8) if out is None else out
    if tuple(data.shape) != shape or not data.is_contiguous() or data.dtype != torch.uint8:
        raise ValueError(
            f"The packed matrix is a contiguous uint8 {list(shape)}; out is {list(data.shape)} "
            f"{data.dtype}."
        )
    source = tiles(matrix)
    limit = matrix.data.numel() // WEIGHTS_PER_CORRECTION
    corrections = _native.pack12(source, data.data_ptr(), limit)
    if corrections is None:
        return None
    fixes = torch.tensor(corrections, dtype=torch.int64).to(torch.int32) if corrections else None
    packed = Matrix("tiles12", matrix.rows, matrix.cols, data, corrections=fixes)
    isa = isa or detect_isa()
    wrong = _native.differing_tiles(isa, tiles(packed), source)
    if wrong:
        raise RuntimeError(
            f"{wrong} of {shape[0]} packed tiles of a [{matrix.rows}, {matrix.cols}] matrix are "
            f"not what was packed, unpacked by the {isa} kernels."
        )
    return packed
