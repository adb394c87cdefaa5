"""The standard forward's native products against fp64."""

from __future__ import annotations

import pytest
import torch

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.native import supported_isas
from kdecode.kernels.linear.native import tiles_linear, tiles_linear_grouped, unpack_tiles

FORMATS = ("tiles", "mxfp4_tiles", "int8_tiles")
ISAS = supported_isas()


def random_rows(num_rows: int, cols: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(got, x, dense):
    gold = x.double() @ dense.T
    scale = x.double().abs() @ dense.abs().T
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 0.0
    assert ((got.double() - gold).abs() <= gold.abs() * rounding + scale * 2.0**-16).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 65])
def test_one_matrix(isa, matrix_format, out_dtype, num_rows, random_matrix):
    made = random_matrix(matrix_format, 37, 96)
    x = random_rows(num_rows, 96)
    got = tiles_linear(x, made.matrix, out_dtype, isa)
    assert got.shape == (num_rows, 37)
    assert got.dtype == out_dtype
    check(got, x, made.dense)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("matrix_format", FORMATS)
def test_a_group_is_its_members(isa, matrix_format, random_matrix):
    made = [random_matrix(matrix_format, 33, 64, seed) for seed in range(4)]
    matrices = [member.matrix for member in made]
    counts = [3, 0, 11, 1]
    x = random_rows(6, 64)
    row_index = torch.tensor([5, 0, 3, *range(6), *range(5), 2])
    got = tiles_linear_grouped(x, matrices, counts, row_index, torch.float32, isa)
    expected = [
        tiles_linear(x[rows], matrix, torch.float32, isa)
        for matrix, rows in zip(matrices, row_index.split(counts), strict=True)
    ]
    assert torch.equal(got, torch.cat(expected))
    assert torch.equal(
        tiles_linear_grouped(x[row_index], matrices, counts, None, torch.float32, isa), got
    )


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_threads_do_not_change_a_bit(matrix_format, random_matrix):
    # Large enough (256 KiB of bf16) to be shared between threads.
    made = random_matrix(matrix_format, 1024, 512)
    x = random_rows(3, 512)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = tiles_linear(x, made.matrix)
        torch.set_num_threads(2)
        assert torch.equal(tiles_linear(x, made.matrix), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("matrix_format", "rows", "cols"), [("tiles", 37, 70), ("mxfp4_tiles", 37, 96)]
)
def test_unpacking_is_exact(isa, matrix_format, rows, cols, random_matrix):
    made = random_matrix(matrix_format, rows, cols, scale_bytes=(3, 250))
    out = torch.full((rows + 1, cols), float("nan"), dtype=torch.bfloat16)
    unpack_tiles(made.matrix, out[:rows], isa)
    assert torch.equal(out[:rows].double(), made.dense)
    assert out[rows].isnan().all(), "nothing may be written past the last row"


def test_what_does_not_fit_is_refused(random_matrix):
    matrix = random_matrix("tiles", 16, 64).matrix
    x = random_rows(2, 64)
    with pytest.raises(ValueError, match=r"its shape is \[2, 64\], not \[3, 64\]"):
        tiles_linear_grouped(x, [matrix], [3])
    with pytest.raises(ValueError, match=r"dtype is torch.float32, not torch.bfloat16"):
        tiles_linear(x.float(), matrix)
    with pytest.raises(ValueError, match="not contiguous"):
        tiles_linear(random_rows(64, 2).T, matrix)
    with pytest.raises(IndexError, match="x has 2 rows"):
        tiles_linear_grouped(x, [matrix], [2], torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="there are 1 matrices"):
        tiles_linear_grouped(x, [matrix], [1, 1])
    with pytest.raises(ValueError, match=r"not torch.float64"):
        tiles_linear(x, matrix, torch.float64)
    with pytest.raises(ValueError, match="this one is in rows"):
        tiles_linear(x, Matrix("rows", 16, 64, torch.zeros(16, 64).bfloat16()))
    other = random_matrix("tiles", 32, 64).matrix
    with pytest.raises(ValueError, match="must agree in rows"):
        tiles_linear_grouped(x, [matrix, other], [1, 1])
