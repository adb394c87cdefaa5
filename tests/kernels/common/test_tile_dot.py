"""The tile kernels of every instruction set against fp64 products of the unpacked numbers."""

from __future__ import annotations

import pytest
import torch
from tile_products import as_multiplied, tile_dot

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import MAX_ROWS, supported_isas, tiles

# Rows that do not fill their last tile; odd numbers of pairs, groups and pieces of the blocking.
SIZES = {
    "tiles": ((16, 2), (5, 6), (33, 64), (48, 514), (16, 1030)),
    "tiles12": ((16, 8), (5, 24), (33, 64), (20, 520)),
    "mxfp4_tiles": ((16, 32), (5, 96), (33, 64), (48, 544)),
    "int8_tiles": ((16, 32), (5, 96), (48, 544)),
    "int4_tiles": ((16, 32), (5, 96), (48, 544)),
}
CASES = [(name, rows, cols) for name, sizes in SIZES.items() for rows, cols in sizes]


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("matrix_format", "rows", "cols"), CASES)
def test_products_match_fp64_for_every_number_of_rows(
    isa, matrix_format, rows, cols, random_matrix
):
    made = random_matrix(matrix_format, rows, cols)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(MAX_ROWS, cols, generator=generator).to(torch.bfloat16)
    exact = as_multiplied(matrix_format, x)
    gold = exact @ made.dense.T
    # An fp32 sum of n products is off by at most about n * 2^-24 of the sum of their sizes.
    bound = (exact.abs() @ made.dense.abs().T) * cols * 2.0**-24 + 1e-30
    for num_rows in range(1, MAX_ROWS + 1):
        error = (tile_dot(isa, made.matrix, x[:num_rows]).double() - gold[:num_rows]).abs()
        assert (error <= bound[:num_rows]).all(), f"{num_rows} rows: {error.max()}"


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(("matrix_format", "rows", "cols"), CASES)
def test_a_row_does_not_depend_on_the_rows_beside_it(isa, matrix_format, rows, cols, random_matrix):
    made = random_matrix(matrix_format, rows, cols)
    x = torch.randn(MAX_ROWS, cols, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    alone = torch.cat([tile_dot(isa, made.matrix, x[r : r + 1]) for r in range(MAX_ROWS)])
    for num_rows in range(1, MAX_ROWS + 1):
        assert torch.equal(tile_dot(isa, made.matrix, x[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("scale_bytes", [(1, 1), (1, 3), (254, 254), (1, 254)])
def test_extreme_scales_are_exact(isa, scale_bytes, random_matrix):
    """One nonzero column a row: no sum rounds: the product is exact wherever fp32 can hold it."""
    made = random_matrix("mxfp4_tiles", 16, 64, scale_bytes=scale_bytes)
    for column in (0, 7, 33, 63):
        x = torch.zeros(1, 64, dtype=torch.bfloat16)
        x[0, column] = 0.25
        gold = made.dense[:, column] * 0.25
        got = tile_dot(isa, made.matrix, x)[0].double()
        # Results below the smallest normal fp32 number may come out as zero or rounded.
        normal = gold.abs() >= 2.0**-126
        assert torch.equal(got[normal], gold[normal])
        assert (got[~normal].abs() <= 2.0**-126).all()


@pytest.mark.parametrize("isa", supported_isas())
def test_nan_in_x_stays_in_its_row(isa, random_matrix):
    for matrix_format in SIZES:
        made = random_matrix(matrix_format, 16, 64)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        x[1, 5] = float("nan")
        y = tile_dot(isa, made.matrix, x)
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


def test_sizes_outside_the_format_are_refused(random_matrix):
    made = random_matrix("tiles", 16, 64)
    with pytest.raises(ValueError, match="65 rows; a tile kernel takes 1 to 64"):
        _native.tile_dot(supported_isas()[0], tiles(made.matrix), 65, 0, 0)
    with pytest.raises(ValueError, match="multiple of 32"):
        _native.Tiles(1, 1, 16, 48, _native.TileFormat.mxfp4)
    with pytest.raises(ValueError, match='"sse9" is not supported here'):
        _native.tile_dot("sse9", tiles(made.matrix), 1, 0, 0)
