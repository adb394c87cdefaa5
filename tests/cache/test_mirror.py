"""What the caches of one rank do is told, so that those of another one end with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kdecode.cache.caches import Caches
from kdecode.cache.mirror import (
    CacheOperation,
    ClearSlot,
    CommitRows,
    DropRows,
    RestoreState,
    SaveState,
)
from kdecode.cache.open_rows import KeptRows, OpenSpan
from kdecode.cache.state_store import StateStore
from kdecode.testing.cases import tiny_linear

SLOTS = 3


@pytest.fixture
def told() -> list[CacheOperation]:
    return []


@pytest.fixture
def caches(told: list[CacheOperation]) -> Caches:
    return Caches.allocate(tiny_linear(), "cpu", SLOTS, 4, 8, tell=told.append)


def test_slots_are_told_of_when_they_are_cleared_and_not_when_they_are_given_back(
    caches: Caches, told: list[CacheOperation]
) -> None:
    slot = caches.allocate_slot()
    caches.free_slot(slot)
    assert told == [ClearSlot(slot)]
    caches.clear_slot(2)
    assert told == [ClearSlot(slot), ClearSlot(2)]


def test_rows_of_a_verify_step_are_told_of_when_they_are_decided(
    caches: Caches, told: list[CacheOperation]
) -> None:
    slots = [caches.allocate_slot() for _ in range(3)]
    told.clear()
    applied: list[Sequence[KeptRows]] = []
    caches.open_rows.open(
        [OpenSpan(slot, 5, 4 * number, 4) for number, slot in enumerate(slots)], applied.append
    )
    with pytest.raises(ValueError, match="9 rows of KDA slot 0 cannot be kept"):
        caches.commit({slots[0]: 9})
    assert told == [], "a refused operation was told"
    caches.free_slot(slots[1])
    assert caches.commit({slots[0]: 3}) == {slots[0]: 8}
    caches.drop_rows(slots[2])
    caches.drop_rows(slots[2])
    assert told == [DropRows(slots[1]), CommitRows(((slots[0], 3),)), DropRows(slots[2])]
    assert len(applied) == 1
    # A step without drafts decides nothing.
    caches.commit({})
    assert len(told) == 3


def test_states_are_told_of_by_place_and_without_their_names(
    caches: Caches, told: list[CacheOperation]
) -> None:
    store = StateStore(caches, 2)
    store.save(b"one", 0)
    store.save(b"two", 1)
    store.save(b"one", 2)
    store.restore(b"two", 2)
    # The longest unused one leaves its place.
    store.save(b"three", 0)
    assert told == [SaveState(0, 0), SaveState(1, 1), RestoreState(1, 2), SaveState(0, 0)]
    with pytest.raises(KeyError):
        store.restore(b"one", 0)
    assert len(told) == 4


def test_caches_of_a_rank_that_is_alone_tell_nobody() -> None:
    caches = Caches.allocate(tiny_linear(), "cpu", SLOTS, 4, 8)
    slot = caches.allocate_slot()
    for state in (*caches.conv.values(), *caches.recurrent.values()):
        state[slot] = 1
    caches.clear_slot(slot)
    assert all(torch.count_nonzero(state[slot]) == 0 for state in caches.recurrent.values())
