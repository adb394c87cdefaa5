"""Which rank stores which positions of every request's latent cache.

Without decode context parallelism each rank has all of them. With it, positions are dealt out in
runs of ``interleave``, to the ranks in their order, and a rank stores its own one behind the other.
Pages keep their numbers on every rank: one covers ``page_tokens`` positions, of which each rank has
as many rows as every other one.

Arithmetic only, on whole numbers or on tensors of them. Knows no requests and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kdecode.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch import Tensor

Positions = TypeVar("Positions", int, "Tensor")


@dataclass(frozen=True)
class ContextShare:
    """What one of ``ranks`` stores. interleave: positions that follow each other on one rank."""

    ranks: Ranks = ALONE
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.interleave < 1:
            raise ValueError(f"interleave is {self.interleave}; it must be at least 1.")

    @staticmethod
    def of(size: int, ranks: Ranks, interleave: int) -> ContextShare:
        """The share that settings ask for. size: 1, or that of ``ranks``."""
        if size not in (1, ranks.size):
            raise ValueError(
                f"The context is to be divided among {size} ranks; it can be 1 or {ranks.size}."
            )
        return WHOLE if size == 1 else ContextShare(ranks, interleave)

    @property
    def is_whole(self) -> bool:
        """Whether there is nobody else to have rows."""
        return self.ranks.is_alone

    @property
    def round_tokens(self) -> int:
        """Positions after which it is the first rank's turn again."""
        return self.interleave * self.ranks.size

    def owner(self, position: Positions) -> Positions:
        """The rank that stores it."""
        return position // self.interleave % self.ranks.size

    def index(self, position: Positions) -> Positions:
        """Where its owner stores it, among all that the owner has of the request."""
        return position // self.round_tokens * self.interleave + position % self.interleave

    def position(self, index: Positions) -> Positions:
        """Which position this rank stores there."""
        place = index % self.interleave
        return (
            index // self.interleave * self.round_tokens + self.ranks.rank * self.interleave + place
        )

    def length(self, num_tokens: int) -> int:
        """How many of the first positions this rank stores."""
        rounds, rest = divmod(num_tokens, self.round_tokens)
        begin = self.ranks.rank * self.interleave
        return rounds * self.interleave + min(max(rest - begin, 0), self.interleave)

    def padded_length(self, num_tokens: int) -> int:
        """`length` where the last round is filled up: the same on every rank."""
        return -(-num_tokens // self.round_tokens) * self.interleave

    def page_rows(self, page_tokens: int) -> int:
        """Rows of a page on each rank. ValueError for a page that does not hold whole rounds."""
        if page_tokens % self.round_tokens:
            raise ValueError(
                f"A page of {page_tokens} positions does not hold whole rounds of "
                f"{self.round_tokens} (ranks: {self.ranks.size}, positions that follow each other "
                f"on one rank: {self.interleave})."
            )
        return page_tokens // self.ranks.size


WHOLE = ContextShare()
