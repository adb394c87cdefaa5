"""Numbered places (KDA slots, MLA pages) given out and taken back with exact accounting.

Knows nothing of what lies in a place. The lowest free numbers are given out first, so a pool that
is not fragmented gives runs of neighbouring pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PoolError(ValueError):
    """A wrong use of a pool: a place freed twice, or one that it does not have."""


class PoolExhaustedError(PoolError):
    """More places were asked for than are free; the message has the numbers."""


class IndexPool:
    """Places 0 .. size - 1. ``noun`` names one of them in messages."""

    def __init__(self, size: int, noun: str) -> None:
        if size < 0:
            raise PoolError(f"A pool of {noun}s cannot have {size} of them.")
        self.size = size
        self.noun = noun
        self._free = list(range(size))  # a sorted list is a heap
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def used(self) -> frozenset[int]:
        return frozenset(self._used)

    def allocate(self, count: int = 1) -> tuple[int, ...]:
        """The lowest ``count`` free places, in order; PoolExhaustedError takes none."""
        if count < 0:
            raise PoolError(f"Cannot allocate {count} {self.noun}s.")
        if count > len(self._free):
            raise PoolExhaustedError(
                f"{count} {self.noun}s were asked for; {len(self._free)} of {self.size} are free."
            )
        taken = tuple(heapq.heappop(self._free) for _ in range(count))
        self._used.update(taken)
        return taken

    def free(self, places: Iterable[int]) -> None:
        """Takes places back; frees none of them if one is unknown, free already or named twice."""
        given = tuple(places)
        if len(set(given)) != len(given):
            raise PoolError(f"A {self.noun} is named twice in {list(given)}.")
        for place in given:
            if not 0 <= place < self.size:
                raise PoolError(f"There is no {self.noun} {place}; the pool has {self.size}.")
            if place not in self._used:
                raise PoolError(f"The {self.noun} {place} is free already.")
        for place in given:
            self._used.remove(place)
            heapq.heappush(self._free, place)
