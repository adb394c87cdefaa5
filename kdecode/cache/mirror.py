"""What rank 0 does to its caches, as values, for the ranks that have to do the same.

Owns the list of these operations. Which slot or place is used is decided on rank 0 alone, so that
no other rank has a pool, a name or a reason of its own. Does not know how a rank is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ClearSlot:
    """See `Caches.clear_slot`."""

    slot: int


@dataclass(frozen=True)
class DropRows:
    """See `Caches.drop_rows`."""

    slot: int


@dataclass(frozen=True)
class CommitRows:
    """See `Caches.commit`. kept: (slot, rows that stay)."""

    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SaveState:
    """See `StatePlaces.save`."""

    place: int
    slot: int


@dataclass(frozen=True)
class RestoreState:
    """See `StatePlaces.restore`."""

    place: int
    slot: int


CacheOperation = ClearSlot | DropRows | CommitRows | SaveState | RestoreState

# Called after each operation that this rank's caches have done.
Tell = Callable[[CacheOperation], None]


def tell_nobody(operation: CacheOperation) -> None:
    """For a rank that is alone, or that follows."""
