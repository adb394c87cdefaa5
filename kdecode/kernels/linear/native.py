"""Products of packed matrices for the standard forward, between torch's operators.

    tiles_linear(x, matrix, out_dtype)                               [T, K] -> [T, N]
    tiles_linear_grouped(x, matrices, counts, row_index, out_dtype)  many experts in one call
    unpack_tiles(matrix, out)                                        row-major bf16, for torch

For matrices in "tiles" and "mxfp4_tiles". Columns of the result are in the order of the matrix's
rows (interleaved gate and up, if that is how the matrix is packed). Any number of rows works, 64 a
pass over a tile; each output element is one fp32 sum in a fixed order, rounded once to
``out_dtype``, whatever the number of rows and threads. Owns no threads: these run in torch's OpenMP
threads, as many as ``torch.get_num_threads()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.native import ptr, tiles


@cache
def _best_isa() -> str:
    return _native.detect_isa()


def tiles_linear(
    x: Tensor, matrix: Matrix, out_dtype: torch.dtype = torch.bfloat16, isa: str | None = None
) -> Tensor:
    """``x @ W.T`` for x [T, K] bf16 and W [N, K] -> [T, N] in ``out_dtype`` (bf16 or fp32).

    isa: instruction set, for tests; None is the best.
    """
    return tiles_linear_grouped(x, [matrix], [x.shape[0]], None, out_dtype, isa)


def tiles_linear_grouped(
    x: Tensor,
    matrices: Sequence[Matrix],
    counts: Sequence[int],
    row_index: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    isa: str | None = None,
) -> Tensor:
    """Products of several matrices of one shape and format, each with its own rows of x.

    x [S, K] bf16. Output rows belong to the matrices in order: ``counts[g]`` of them to
    ``matrices[g]``, P in all. Output row p is W times ``x[row_index[p]]`` (row_index [P] int64), or
    times ``x[p]`` without row_index, then S == P. -> [P, N] in ``out_dtype``.
    """
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"The products come in torch.bfloat16 or torch.float32, not {out_dtype}.")
    if len(counts) != len(matrices) or not matrices or min(counts) < 0:
        raise ValueError(
            f"Every matrix needs its number of rows, from 0 up; there are {len(matrices)} matrices "
            f"and the counts are {list(counts)}."
        )
    num_rows, width = sum(counts), matrices[0].cols
    if row_index is None:
        index, num_inputs = 0, num_rows
    else:
        index, num_inputs = ptr(row_index, torch.int64, (num_rows,)), x.shape[0]
        if num_rows and not 0 <= int(row_index.min()) <= int(row_index.max()) < num_inputs:
            raise IndexError(
                f"row_index has values from {int(row_index.min())} to {int(row_index.max())}; "
                f"x has {num_inputs} rows."
            )
    out = torch.empty(num_rows, matrices[0].rows, dtype=out_dtype)
    _native.linear(
        _best_isa() if isa is None else isa,
        ptr(x, torch.bfloat16, (num_inputs, width)),
        index,
        out.data_ptr(),
        out_dtype == torch.float32,
        [tiles(matrix) for matrix in matrices],
        counts,
    )
    return out


def unpack_tiles(matrix: Matrix, out: Tensor, isa: str | None = None) -> None:
    """``out`` [N, K] bf16 = the matrix in row-major order; MXFP4 is dequantised, exactly."""
    address = ptr(out, torch.bfloat16, (matrix.rows, matrix.cols))
    _native.unpack(_best_isa() if isa is None else isa, tiles(matrix), address)
