"""How GPUs of several ranks tell each other that a block of parts is whole: where the words lie.

Every rank has a row of flags for a block in memory that all ranks write to: word r, int32, says how
often rank r's block was whole. A table has what one rank's kernels need for that, as addresses and
numbers; they read it on the device (`triton_peers.py`). Knows neither Triton nor how the memory is
made.

A rank may write its block again without asking, because of the order of the exchanges: between two
uses of a block there is one of another block. A rank that has waited for that has every other
rank's signal of it, which that rank sent behind its reads of the first block, in the order of its
own launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Behind the addresses of the flags, as many as there are ranks: places in the table.
EPOCH, FAULT, RANK, PLACE = 0, 1, 2, 3
_MORE = 4
# Words of what `FAULT` leads to, before a word for each rank.
LIMIT, GIVEN_UP, LATE = 0, 1, 2
# A thread of a warp for each (`triton_peers.py`), and more than the GPUs of any host.
MOST_RANKS = 32
# How many programs of a launch may wait for others of it: those run then if a GPU has room for one
# more, which is not fewer than it has multiprocessors.
MOST_WAITING = 64


@dataclass(frozen=True)
class PeerTable:
    """flags: of every rank its row for this block, in the order of the ranks. epoch: of one int32,
    how often this rank's own block was whole. fault: of int32 words, see `fault_words`. rank: this
    one. place: the number of the block, from 0."""

    flags: Sequence[int]
    epoch: int
    fault: int
    rank: int
    place: int

    def words(self) -> list[int]:
        """int64, as kernels read them."""
        return [*self.flags, self.epoch, self.fault, self.rank, self.place]


def table_words(size: int) -> int:
    """Numbers of a table of so many ranks."""
    return size + _MORE


def fault_words(size: int) -> int:
    """int32 words that all blocks of a rank share: how many milliseconds a wait may take; whether
    waits have been given up, whereupon later ones return at once; and of each rank, for which block
    it was waited in vain, counted from 1, 0 where it was not."""
    return LATE + size
