"""Which of the processes that share a model this one is, and the error that names one of them.

Values that are passed to whoever needs them, and that anybody may import. Knows no processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """One of ``size`` ranks, 0-based. Rank 0 decides and the others follow."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; with {self.size} ranks it must be below that.")

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def part(self, total: int) -> int:
        """How much of ``total`` each rank has. Raises ValueError where it does not divide."""
        if total % self.size:
            raise ValueError(f"{total} cannot be divided among {self.size} ranks.")
        return total // self.size

    def span(self, total: int) -> tuple[int, int]:
        """[begin, end) of this rank's part of ``total``."""
        each = self.part(total)
        return self.rank * each, (self.rank + 1) * each


ALONE = Ranks(0, 1)


class RankError(RuntimeError):
    """The ranks of a model are at their end because of this one; another of them is no use.

    what: what it did, in words that follow its name: "of 4 (process 17) died with signal 9".
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(rank, what)
        self.rank = rank
        self.what = what

    def __str__(self) -> str:
        return f"Rank {self.rank} {self.what}"
