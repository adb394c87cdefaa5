"""Products of the standard forward: every format, up to several passes of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.linear.product import ProductSettings, make_head_linear, make_linear
from kdecode.kernels.linear.unpack import unpack_rows

ROWS = (1, 9, 64, 65, 150)


def _matrix(
    random_matrix: Callable[..., Any], form: str, rows: int, cols: int
) -> tuple[Matrix, torch.Tensor]:
    if form == "rows":
        dense = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()
        return Matrix("rows", rows, cols, dense), dense.double()
    made = random_matrix(form, rows, cols)
    return made.matrix, made.dense


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("form", ["rows", "tiles", "mxfp4_tiles"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_fp32", [False, True])
def test_linear(random_matrix: Callable[..., Any], form: str, rows: int, is_fp32: bool) -> None:
    matrix, dense = _matrix(random_matrix, form, 72, 64)
    # A column slice, as the ops pass them.
    x = _input(rows, 70)[:, :64]
    out_dtype = torch.float32 if is_fp32 else torch.bfloat16
    y = make_linear(matrix, ProductSettings("cpu"), out_dtype)(x)
    gold = x.double() @ dense.T
    assert y.dtype == out_dtype
    bound = 1e-5 if is_fp32 else 2.0**-8
    assert (y.double() - gold).abs().max() <= bound * gold.abs().max()


@pytest.mark.parametrize("form", ["rows", "tiles"])
@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("rows", ROWS)
def test_head_linear(random_matrix: Callable[..., Any], form: str, width: int, rows: int) -> None:
    """Heads of whole tiles are sliced; others are not."""
    heads, cols = 3, 32
    matrix, dense = _matrix(random_matrix, form, heads * width, cols)
    x = _input(rows, heads, cols)
    y = make_head_linear(matrix, heads, ProductSettings("cpu"))(x)
    gold = torch.einsum("rhc,hwc->rhw", x.double(), dense.view(heads, width, cols))
    assert y.shape == gold.shape
    assert (y.double() - gold).abs().max() <= 2.0**-8 * gold.abs().max()


@pytest.mark.parametrize("form", ["tiles", "mxfp4_tiles"])
@pytest.mark.parametrize("rows", [16, 72, 5])
def test_torch_unpacks_exactly(random_matrix: Callable[..., Any], form: str, rows: int) -> None:
    made = random_matrix(form, rows, 96)
    assert torch.equal(unpack_rows(made.matrix).double(), made.dense)
