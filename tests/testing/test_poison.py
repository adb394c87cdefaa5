"""Poisoned memory: every dtype, free entries of pools, tails of pages."""

from __future__ import annotations

import pytest
import torch

from kdecode.testing.poison import is_poison, poison_except_, poison_tail_, poisoned

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = poisoned((3, 2), dtype)
    assert x.dtype == dtype
    assert is_poison(x).all()
    if dtype.is_floating_point:
        assert torch.isnan(x.float()).all()
    elif dtype == torch.int32:
        with pytest.raises(IndexError):
            torch.zeros(4)[x.long()]
    x.view(torch.uint8 if x.element_size() == 1 else dtype)[1] = 0
    assert is_poison(x).tolist() == [[True, True], [False, False], [True, True]]


def test_bool_is_refused() -> None:
    with pytest.raises(ValueError, match="bool"):
        poisoned((1,), torch.bool)


def test_free_entries_of_pools() -> None:
    pools = [torch.ones(4, 2, 3), torch.ones(4, 5, dtype=torch.bfloat16)]
    poison_except_(pools, used=[2, 0])
    for pool in pools:
        assert is_poison(pool).flatten(1).all(1).tolist() == [False, True, False, True]
        assert torch.equal(pool[[0, 2]], torch.ones_like(pool[[0, 2]]))
    with pytest.raises(IndexError, match=r"\[4\] are not in a pool of 4"):
        poison_except_(pools, used=[4])


def test_tail_of_the_last_pages() -> None:
    pages = torch.zeros(5, 4, 2)
    poison_tail_(pages, table=[3, 1, 4], num_tokens=6)
    tokens = is_poison(pages).all(-1)
    assert tokens[3].tolist() == [False] * 4
    assert tokens[1].tolist() == [False, False, True, True]
    assert tokens[4].all()
    assert not tokens[[0, 2]].any()
