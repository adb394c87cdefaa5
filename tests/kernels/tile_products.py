"""Products of the tile kernels, for tests: the kernel under test, and x as it takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.native import tiles


def tile_dot(isa: str, matrix: Matrix, x: Tensor) -> Tensor:
    """[R, rows] fp32, by the kernel under test; its output is poisoned before."""
    num_rows, num_tiles = x.shape[0], -(-matrix.rows // 16)
    y = torch.full((num_tiles, num_rows, 16), float("nan"))
    _native.tile_dot(isa, tiles(matrix), num_rows, x.data_ptr(), y.data_ptr())
    padded = y.permute(1, 0, 2).reshape(num_rows, num_tiles * 16)
    assert (padded[:, matrix.rows :] == 0).all(), "rows that are only padding must come out as zero"
    return padded[:, : matrix.rows]


def as_multiplied(matrix_format: str, x: Tensor) -> Tensor:
    """x in fp64 as kernels take it: for 8-bit weights with 16 bits (see docs/numerics.md)."""
    if matrix_format != "int8_tiles":
        return x.double()
    groups = x.double().unflatten(-1, (-1, 32))
    # A group's largest number is in [2^(e-1), 2^e); steps are normal fp32 numbers.
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True)).exponent.clamp(min=-111)
    step = torch.exp2(exponent.double() - 15)
    return ((groups / step).round() * step).flatten(-2)
