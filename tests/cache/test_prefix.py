"""Prefixes without a model: names, what is found, who holds pages, what is given away first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdecode.cache.caches import Caches
from kdecode.cache.pool import IndexPool, PoolError, PoolExhaustedError
from kdecode.cache.prefix import Hit, PrefixCache, common_boundary, state_interval
from kdecode.cache.shared_pages import SharedPages
from kdecode.cache.state_store import StateStore
from kdecode.config import ConfigError

PAGE, INTERVAL = 4, 8


def caches(slots: int = 3, pages: int = 20) -> Caches:
    """Slots of one layer whose state is a number, so that a copy can be told from another."""
    return Caches(
        page_tokens=PAGE,
        cache_dtype="bf16",
        conv={0: torch.zeros(slots, 2, 3, dtype=torch.bfloat16)},
        recurrent={0: torch.zeros(slots, 2, 2, 2)},
        pages={},
        scales={},
        slot_pool=IndexPool(slots, "KDA slot"),
        page_pool=IndexPool(pages, "MLA page"),
    )


def names_of(cache: PrefixCache, ids: list[int], salt: str = "") -> list[bytes]:
    names: list[bytes] = []
    cache.name_pages(names, ids, salt)
    return names


def put(cache: PrefixCache, ids: list[int], chunk: int = INTERVAL, slot: int = 0) -> list[int]:
    """A request computes a prompt in chunks and ends; its pages."""
    names = names_of(cache, ids)
    pages = list(cache.pages.allocate(-(-len(ids) // PAGE)))
    for begin in range(0, len(ids), chunk):
        end = min(begin + chunk, len(ids))
        cache.publish(names, pages, (begin, end), slot)
    cache.pages.free(pages)
    return pages


@given(
    first=st.lists(st.integers(0, 1), max_size=20),
    second=st.lists(st.integers(0, 1), max_size=20),
)
def test_pages_have_one_name_where_all_tokens_up_to_their_end_are_the_same(
    first: list[int], second: list[int]
) -> None:
    cache = PrefixCache(caches(), INTERVAL, 1)
    for page, (a, b) in enumerate(
        zip(names_of(cache, first), names_of(cache, second), strict=False)
    ):
        end = (page + 1) * PAGE
        assert (a == b) == (first[:end] == second[:end])


def test_names_depend_on_everything_that_decides_the_content() -> None:
    ids = list(range(8))
    plain, other = (PrefixCache(caches(), INTERVAL, 1, salt) for salt in ("", "fp8"))
    found = [
        names_of(plain, ids),
        names_of(plain, ids, "tenant"),
        names_of(other, ids),
        # What belongs to one salt cannot be moved into the other.
        names_of(PrefixCache(caches(), INTERVAL, 1, "fp"), ids, "8"),
    ]
    assert len({tuple(names) for names in found}) == 4
    assert names_of(plain, ids, "\ud800")
    grown = names_of(plain, ids[:5])
    plain.name_pages(grown, ids, "")
    assert grown == found[0]


@pytest.mark.parametrize("stored", range(0, 40, 3))
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 25, 33])
def test_what_is_found_is_what_is_predicted(stored: int, length: int) -> None:
    """The longest multiple of the interval that was stored whole, with a token left to compute."""
    cache = PrefixCache(caches(), INTERVAL, 8)
    ids = list(range(100, 140))
    put(cache, ids[:stored])
    hit = cache.find(names_of(cache, ids[:length]), length)
    expected = min(stored, length - 1) // INTERVAL * INTERVAL
    assert hit.num_tokens == expected
    assert len(hit.pages) == expected // PAGE
    assert hit.paged_tokens == min(stored // PAGE, (length - 1) // PAGE) * PAGE


def test_a_hit_without_its_state_goes_back_to_the_longest_prefix_that_has_one() -> None:
    cache = PrefixCache(caches(), INTERVAL, 8)
    ids = list(range(30))
    put(cache, ids)
    names = names_of(cache, ids)
    assert cache.find(names, 30).num_tokens == 24
    cache.states.drop(names[24 // PAGE - 1])
    hit = cache.find(names, 30)
    assert (hit.num_tokens, hit.paged_tokens) == (16, 28)
    cache.count(hit, 30)
    assert cache.counts.lost_to_state == 12
    cache.states.clear()
    assert cache.find(names, 30) == Hit(0, (), 28)


def test_a_chunk_that_ends_elsewhere_keeps_no_state() -> None:
    cache = PrefixCache(caches(), INTERVAL, 8)
    put(cache, list(range(30)), chunk=12)
    # Of the chunk ends 12, 24 and 30 only one is on the interval.
    assert cache.states.num_used == 1
    assert cache.find(names_of(cache, list(range(30))), 30).num_tokens == 24


@given(
    st.lists(st.sets(st.integers(1, 12)), min_size=2, max_size=4),
    st.lists(st.sampled_from((1, 2, 3)), min_size=4, max_size=4),
)
def test_the_boundary_is_the_largest_that_every_group_serves(
    groups: list[set[int]], grains: list[int]
) -> None:
    """Groups of different grain: their own largest boundaries need not have one in common."""
    kinds = [{n * grain for n in group} for group, grain in zip(groups, grains, strict=False)]
    found = common_boundary(range(1, 40), [kind.__contains__ for kind in kinds])
    assert found == max(set.intersection(*kinds), default=0)


def test_states_come_back_whole_and_the_one_not_used_for_longest_goes() -> None:
    live = caches()
    store = StateStore(live, 2)
    for slot in range(3):
        live.conv[0][slot] = slot + 1
        live.recurrent[0][slot] = slot + 1
    store.save(b"a", 0)
    store.save(b"b", 1)
    store.restore(b"a", 2)
    assert live.conv[0][2].eq(1).all()
    assert live.recurrent[0][2].eq(1).all()
    store.save(b"c", 1)
    assert [name in store for name in (b"a", b"b", b"c")] == [True, False, True]
    assert (store.num_used, store.num_evictions) == (2, 1)
    with pytest.raises(KeyError):
        store.restore(b"b", 0)
    # A second state of the same name is as good as the first.
    store.save(b"a", 1)
    store.restore(b"a", 0)
    assert live.recurrent[0][0].eq(1).all()


def test_pages_are_shared_kept_idle_and_given_away_from_the_end_of_the_oldest() -> None:
    forgotten: list[bytes] = []
    pool = IndexPool(4, "MLA page")
    pages = SharedPages(pool, forgotten.append)
    first = pages.allocate(2)
    for page, name in zip(first, (b"a1", b"a2"), strict=True):
        pages.publish(page, name)
    pages.hold(first)
    pages.free(first)
    assert (pages.num_free, pages.num_idle) == (2, 0)
    pages.free(first)
    assert (pages.num_free, pages.num_idle, pages.find(b"a1")) == (4, 2, first[0])
    # Pages of no name come first, then the last page of the prefix that is idle for longest.
    taken = pages.allocate(3)
    assert forgotten == [b"a2"]
    assert first[1] in taken
    with pytest.raises(PoolExhaustedError, match="2 MLA pages were asked for; 1 of 4 are free"):
        pages.allocate(2)
    assert pages.find(b"a1") == first[0]
    pages.free(taken)
    pages.clear()
    assert (pool.num_used, pages.num_named, forgotten) == (0, 0, [b"a2", b"a1"])


def test_wrong_uses_of_shared_pages_are_refused() -> None:
    pages = SharedPages(IndexPool(3, "MLA page"), lambda name: None)
    (page,) = pages.allocate()
    with pytest.raises(PoolError, match="no known content"):
        pages.hold([page])
    with pytest.raises(PoolError, match="named twice"):
        pages.free([page, page])
    pages.free([page])
    with pytest.raises(PoolError, match="held by nobody"):
        pages.free([page])
    with pytest.raises(PoolError, match="held by nobody"):
        pages.publish(page, b"x")


def test_pages_of_an_incomplete_block_are_not_shared() -> None:
    """A prompt that ends inside of a block has other last bits there than one that goes on."""
    cache = PrefixCache(caches(), INTERVAL, 8, block_tokens=INTERVAL)
    put(cache, list(range(6)))
    assert cache.pages.num_named == 0
    pages = put(cache, list(range(20)))
    assert cache.pages.num_named == 4
    assert cache.find(names_of(cache, list(range(20))), 17).pages == tuple(pages[:4])
    # Pages of a block that chunks have cut are named when it is complete.
    put(cache, [7] * 8, chunk=6)
    assert cache.pages.num_named == 6


def test_the_same_content_computed_twice_is_found_once_and_leaks_nothing() -> None:
    live = caches()
    cache = PrefixCache(live, INTERVAL, 8)
    ids = list(range(16))
    names = names_of(cache, ids)
    held = [list(cache.pages.allocate(4)) for _ in range(2)]
    for pages in held:
        cache.publish(names, pages, (0, 16), 0)
    assert cache.find(names, 17).pages == tuple(held[0])
    for pages in held:
        cache.pages.free(pages)
    assert (live.page_pool.num_used, cache.pages.num_idle) == (4, 4)
    cache.clear()
    assert (live.page_pool.num_used, cache.states.num_used) == (0, 0)


def test_a_state_goes_with_the_page_that_it_stands_behind() -> None:
    cache = PrefixCache(caches(pages=4), INTERVAL, 8)
    put(cache, list(range(16)))
    assert cache.states.num_used == 2
    cache.pages.free(cache.pages.allocate(1))
    assert cache.states.num_used == 1
    assert cache.find(names_of(cache, list(range(16))), 17).num_tokens == 8


def test_an_interval_that_pages_or_chunks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="state_interval_tokens is 48; it must be a multiple"):
        state_interval(16, 64, 512, 48)
    with pytest.raises(ConfigError, match="multiple of 192"):
        state_interval(96, 64, 512, 128)
    assert state_interval(16, 64, 512, 128) == 128
    assert [state_interval(64, 64, tokens) for tokens in (512, 500, 17)] == [512, 448, 64]
    with pytest.raises(ConfigError, match="room for 0 states"):
        PrefixCache(caches(), INTERVAL, 0)
