"""Which lane loads what, and the sizes of launches: without CuTe DSL, and without a GPU."""

from __future__ import annotations

from dataclasses import replace

import cute_twin
import pytest
import torch

from kdecode.kernels.common.cute_tiles import (
    CHUNK,
    LANES,
    MAX_ROWS,
    MMA_K,
    MMA_M,
    STEPS,
    VECTOR,
    CuteTile,
    ProductSizes,
    default_tile,
    lane_column,
    lane_row,
    sum_place,
)
from kdecode.kernels.projection.op import CONTRACT
from kdecode.testing.compare import assert_close

# Output and input columns at one of 8 and of 16 ranks of Kimi K3, and small ones.
K3 = ((6284, 7168), (3206, 7168), (3648, 7168), (2880, 7168), (20480, 7168), (10240, 7168))
JOINS = ((7168, 1536), (7168, 768))
SMALL = ((1, 8), (17, 40), (160, 48), (177, 160), (33, 1000))


def test_a_lane_names_the_same_columns_in_both_operands() -> None:
    """Columns of one instruction in any order, but W and x in the same one; each exactly once."""
    columns = lane_column(cute_twin.LANE)[:, None] + torch.arange(VECTOR)
    seen = []
    for step in range(STEPS):
        left = cute_twin.left_operand(columns.repeat(1, 2).float(), step)
        right = cute_twin.right_operand(columns.float(), step)
        assert torch.equal(left[0], right[:, 0])
        assert (left == left[:1]).all()
        assert (right == right[:, :1]).all()
        seen += left[0].tolist()
    assert sorted(seen) == list(range(CHUNK))


def test_a_lane_has_the_rows_that_the_instruction_asks_for() -> None:
    rows = lane_row(cute_twin.LANE)[:, None].expand(LANES, VECTOR)
    both = torch.cat([rows, rows + MMA_M // 2], dim=1).float()
    for step in range(STEPS):
        left = cute_twin.left_operand(both, step)
        assert torch.equal(left, torch.arange(MMA_M).float()[:, None].expand(MMA_M, MMA_K))
        right = cute_twin.right_operand(rows.float(), step)
        assert torch.equal(right, torch.arange(MAX_ROWS).float().expand(MMA_K, MAX_ROWS))


def test_every_sum_is_left_where_its_column_and_row_are() -> None:
    c = torch.arange(MMA_M * MAX_ROWS).view(1, 1, MMA_M, MAX_ROWS).float()
    assert torch.equal(cute_twin.columns_of_block(cute_twin.sums_of_lanes(c)), c[0])
    places = [sum_place(lane, p, h) for lane in range(LANES) for p in (0, 1) for h in (0, 1)]
    assert len(set(places)) == MMA_M * MAX_ROWS


@pytest.mark.parametrize(("columns", "inner"), K3 + JOINS + SMALL)
def test_parts_have_every_input_column_once(columns: int, inner: int) -> None:
    sizes = ProductSizes(columns, inner, default_tile(columns, inner))
    covered = []
    for part in range(sizes.parts):
        begin = part * sizes.part_columns
        end = min(begin + sizes.part_columns, inner)
        assert sizes.rounds * sizes.block_columns >= end - begin
        covered += range(begin, end)
    assert covered == list(range(inner))
    assert sizes.blocks * sizes.block_n >= columns
    assert sizes.outputs_a_thread * sizes.threads >= sizes.block_n * MAX_ROWS
    assert sizes.threads <= 1024
    assert sizes.shared_bytes <= 227 << 10


@pytest.mark.parametrize(("columns", "inner"), K3 + JOINS)
def test_default_tiles_give_every_processor_two_programs(columns: int, inner: int) -> None:
    sizes = ProductSizes(columns, inner, default_tile(columns, inner))
    assert sizes.blocks * sizes.tile.split >= 296
    # The output projection is in registers before the attention is over.
    assert (columns, inner) not in JOINS or sizes.rounds == 1


def test_tiles_and_matrices_that_cannot_be() -> None:
    tile = CuteTile(1, 4, 2, 4)
    for name, value in (("split", 3), ("split", 16), ("warps", 0), ("warps", 32), ("chunks", 13)):
        with pytest.raises(ValueError, match="split is a power of two up to 8"):
            ProductSizes(16, 16, replace(tile, **{name: value}))
    with pytest.raises(ValueError, match=r"16 x 12; rows have a multiple of 8"):
        ProductSizes(16, 12, tile)


# Tiles, chunks, programs and warps of a block: parts without columns, parts that are not full.
TILES = ((1, 1, 1, 1), (1, 2, 2, 2), (2, 3, 1, 4), (2, 4, 4, 8), (3, 4, 8, 1), (1, 12, 1, 16))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("columns", "inner"), SMALL[::2])
def test_products(columns: int, inner: int, tile: tuple[int, ...]) -> None:
    """By the projection's tolerance, in memory that is NaN around what may be read."""
    made = torch.Generator().manual_seed(columns + inner)
    sizes = ProductSizes(columns, inner, CuteTile(*tile))
    x = torch.randn(MAX_ROWS, inner, generator=made).bfloat16()
    weight = between_nans(torch.randn(columns, inner, generator=made).bfloat16())
    gold = x.double() @ weight.double().t()
    whole = cute_twin.product(between_nans(x), weight, MAX_ROWS, sizes)
    assert_close(whole.bfloat16(), gold, CONTRACT.tolerance, "product")
    for rows in (1, 3):
        few = cute_twin.product(between_nans(x[:rows]), weight, rows, sizes)
        # A row has the same bits whichever rows are beside it.
        assert torch.equal(few[:rows], whole[:rows])
        assert torch.equal(few[rows:], torch.zeros(MAX_ROWS - rows, columns))


def between_nans(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory of which all the others are NaN."""
    rows, inner = matrix.shape
    memory = torch.full((rows + 2 * MMA_M, inner), torch.nan, dtype=matrix.dtype)
    memory[MMA_M : MMA_M + rows] = matrix
    return memory[MMA_M : MMA_M + rows]
