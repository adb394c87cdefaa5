"""Cache rows: places, fp8 scale on both ways, pages in any order."""

from __future__ import annotations

import pytest
import torch

from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.mla_attention.rows import CacheRows
from kdecode.model import reference
from kdecode.testing.compare import bit_equal
from kdecode.testing.poison import is_poison, poisoned

WIDTH, PAGE = 24, 4
PLACES = torch.tensor([13, 14, 15, 8, 9])  # page 3 from its second row, then page 2


def _span(pages: tuple[int, ...], context: int) -> RequestSpan:
    is_run = pages == tuple(range(pages[0], pages[0] + len(pages)))
    index = torch.tensor(pages)
    return RequestSpan(0, 1, context - 1, 0, index, pages[0] if is_run else None)


def _values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(5, WIDTH, generator=generator) * 3).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_go_to_their_places_and_nowhere_else(dtype: torch.dtype) -> None:
    pages = poisoned((5, PAGE, WIDTH), dtype)
    CacheRows(pages, 1.0).insert(PLACES, _values())
    written = ~is_poison(pages).flatten(0, 1).any(-1)
    assert written.nonzero().flatten().tolist() == sorted(PLACES.tolist())


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_fp8_round_trip(scale: float) -> None:
    """Stored as x / scale, read as stored * scale: the scale never shows in what is read."""
    pages, values = poisoned((5, PAGE, WIDTH), torch.float8_e4m3fn), _values()
    values[0, 0] = 1e6  # clamped, not infinite or NaN
    rows = CacheRows(pages, scale)
    rows.insert(PLACES, values)
    stored = reference.store_rows(values, "fp8", scale)
    bit_equal(pages.flatten(0, 1)[PLACES], stored, "stored")
    pages.view(torch.uint8)[3, 0] = 0
    read = rows.gather(_span((3, 2), 6))[1:]
    bit_equal(read, reference.load_rows(stored, reference.ROUNDED, scale), "read")
    assert read[0, 0] == 448 * scale
    inner = values[1:].float()
    assert ((read[1:].float() - inner).abs() <= inner.abs() / 16 + scale / 500).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("table", [(1, 2, 3), (3, 0, 2)])
def test_gather_follows_the_table_up_to_the_length(
    dtype: torch.dtype, table: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randn(5, PAGE, WIDTH, generator=generator).to(dtype)
    rows = CacheRows(pages, 1.0).gather(_span(table, 10))
    expected = torch.cat([pages.float()[page] for page in table])[:10].bfloat16()
    bit_equal(rows, expected, "rows")
