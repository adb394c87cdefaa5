"""Exact accounting of slots and pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdecode.cache.pool import IndexPool, PoolError, PoolExhaustedError


def test_lowest_places_come_first_and_come_back() -> None:
    pool = IndexPool(4, "MLA page")
    assert pool.allocate(3) == (0, 1, 2)
    pool.free((1,))
    assert pool.allocate(2) == (1, 3)
    assert (pool.num_free, pool.num_used, pool.used) == (0, 4, frozenset({0, 1, 2, 3}))


def test_an_exhausted_pool_refuses_with_the_numbers_and_gives_nothing() -> None:
    pool = IndexPool(4, "MLA page")
    pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="3 MLA pages were asked for; 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ((0, 0), "named twice"),
        ((4,), "There is no KDA slot 4; the pool has 4"),
        ((-1,), "There is no KDA slot -1"),
        ((3,), "KDA slot 3 is free already"),
    ],
)
def test_a_wrong_free_raises_and_frees_nothing(places: tuple[int, ...], message: str) -> None:
    pool = IndexPool(4, "KDA slot")
    pool.allocate(2)
    with pytest.raises(PoolError, match=message):
        pool.free((1, *places))
    assert pool.used == {0, 1}


def test_double_free_raises() -> None:
    pool = IndexPool(2, "KDA slot")
    places = pool.allocate()
    pool.free(places)
    with pytest.raises(PoolError, match="free already"):
        pool.free(places)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_no_place_is_given_twice(counts: list[int]) -> None:
    """0 frees what was given first, another number asks for so many."""
    pool, held = IndexPool(12, "page"), list[tuple[int, ...]]()
    for count in counts:
        if count == 0 and held:
            pool.free(held.pop(0))
        elif 0 < count <= pool.num_free:
            held.append(pool.allocate(count))
        flat = [place for places in held for place in places]
        assert len(set(flat)) == len(flat)
        assert pool.used == set(flat)
        assert pool.num_free + pool.num_used == 12
