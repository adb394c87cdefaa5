"""Copies of KDA slots in host memory, by the name of the tokens that they have seen.

Owns the memory: so many places, allocated once, least recently used first to be given to another
state. Window and recurrent state of every layer are one thing here, so that neither can be restored
without the other. A copy is complete when `save` returns, and `restore` copies it out again, so
none is in use between two calls.
"""

from __future__ import annotations

import torch

from kdecode.cache.caches import Caches
from kdecode.cache.mirror import RestoreState, SaveState
from kdecode.cache.pool import IndexPool


class StatePlaces:
    """The memory of the copies. Who has which place is not known here."""

    def __init__(self, caches: Caches, num_places: int) -> None:
        self._live = (*caches.conv.values(), *caches.recurrent.values())
        self._saved = tuple(
            torch.empty((num_places, *live.shape[1:]), dtype=live.dtype, device="cpu")
            for live in self._live
        )

    @property
    def num_bytes(self) -> int:
        return sum(saved.numel() * saved.element_size() for saved in self._saved)

    def save(self, place: int, slot: int) -> None:
        """Keeps the state that a slot has now."""
        for live, saved in zip(self._live, self._saved, strict=True):
            saved[place].copy_(live[slot])

    def restore(self, place: int, slot: int) -> None:
        """Puts it into a slot."""
        for live, saved in zip(self._live, self._saved, strict=True):
            live[slot].copy_(saved[place])


class StateStore:
    """States of the slots of ``caches``."""

    def __init__(self, caches: Caches, num_places: int) -> None:
        self._places = StatePlaces(caches, num_places)
        self._tell = caches.tell
        self._pool = IndexPool(num_places, "state checkpoint")
        # Ordered: the first one has not been used for longest.
        self._place_of: dict[bytes, int] = {}
        self.num_evictions = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._place_of

    @property
    def num_places(self) -> int:
        return self._pool.size

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    @property
    def num_bytes(self) -> int:
        return self._places.num_bytes

    def save(self, name: bytes, slot: int) -> None:
        """Keeps the state that a slot has now. One of that name is as good, and stays."""
        if name in self._place_of:
            self._touch(name)
            return
        if not self._pool.num_free:
            self.drop(next(iter(self._place_of)))
            self.num_evictions += 1
        (place,) = self._pool.allocate()
        self._places.save(place, slot)
        self._tell(SaveState(place, slot))
        # Last, so that a copy that breaks is never found.
        self._place_of[name] = place

    def restore(self, name: bytes, slot: int) -> None:
        """Puts a state into a slot. KeyError for one that is not here."""
        place = self._place_of[name]
        self._places.restore(place, slot)
        self._tell(RestoreState(place, slot))
        self._touch(name)

    def drop(self, name: bytes) -> None:
        """Forgets a state, if it is here."""
        place = self._place_of.pop(name, None)
        if place is not None:
            self._pool.free((place,))

    def clear(self) -> None:
        for name in list(self._place_of):
            self.drop(name)

    def _touch(self, name: bytes) -> None:
        self._place_of[name] = self._place_of.pop(name)
