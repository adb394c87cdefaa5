"""Default tiles of the skinny products, at the shapes of Kimi K3 on one of 8 and of 16 ranks."""

from __future__ import annotations

import pytest

from kdecode.kernels.common.triton_launch import divide_up
from kdecode.kernels.common.triton_product import product_rows, product_tile

# Output and input columns: inputs of attention, the head, and the ends of both kinds of block.
SPLIT = ((6284, 7168), (3206, 7168), (3648, 7168), (2880, 7168), (20480, 7168), (10240, 7168))
WHOLE = ((7168, 1536), (7168, 768), (7168, 3584), (7168, 4224), (7168, 2112))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 64])
@pytest.mark.parametrize(("columns", "inner"), SPLIT + WHOLE)
def test_tiles_keep_a_large_gpu_busy(columns: int, inner: int, rows: int) -> None:
    can_split = (columns, inner) in SPLIT
    tile = product_tile("unknown", "sm_90", rows, columns, inner, can_split=can_split)
    assert divide_up(columns, tile.block_n) * tile.split >= 112
    assert can_split or tile.split == 1
    # Powers of two, as Triton's blocks are; a tensor core has at least 16 of everything.
    assert all(size & (size - 1) == 0 for size in (tile.block_n, tile.block_k, tile.warps))
    if rows > 2:
        assert min(tile.block_n, tile.block_k, product_rows(rows)) >= 16


@pytest.mark.parametrize("inner", [16, 40, 90, 96, 160])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_small_models_have_tiles_too(inner: int, rows: int) -> None:
    tile = product_tile("unknown", "", rows, 100, inner, can_split=True)
    assert tile.block_k >= 16
    assert tile.warps >= 1


def test_rows_of_a_product() -> None:
    assert [product_rows(rows) for rows in (1, 2, 3, 16, 17, 64)] == [1, 2, 16, 16, 32, 64]
    with pytest.raises(ValueError, match="65 rows"):
        product_rows(65)
