"""Whether the ranks of a model still do the same: a digest of each, compared after every step.

Owns what goes into it: every operation so far, in order, and the last rows of `prefix`, which all
ranks compute from the same bits. What a rank has alone (its heads, its part of a sum) is not in it:
a wrong part makes every rank wrong alike. For debugging; it costs an exchange a step.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.engine.operations import Operation
from kdecode.parallel.ranks import Ranks


class DisagreementError(RuntimeError):
    """Ranks have diverged. rank: the first whose digest is not the common one."""

    def __init__(self, rank: int, digests: Sequence[int]) -> None:
        self.rank = rank
        shown = ", ".join(f"{digest:08x}" for digest in digests)
        super().__init__(
            f"diverged: the digests of what each rank was told and has in `prefix` are {shown}"
        )


class Agreement:
    """One rank's digest. gather: see `kernels.contract.Exchange`."""

    def __init__(self, ranks: Ranks, gather: Callable[[Tensor], Tensor]) -> None:
        self._ranks = ranks
        self._gather = gather
        self._told = 0

    def note(self, operation: Operation) -> None:
        """An operation that this rank has begun, as leader or as follower."""
        self._told = zlib.crc32(repr(operation).encode(), self._told)

    def compare(self, batch: StepBatch, prefix: Tensor) -> None:
        """Every rank calls it behind the same step. Raises DisagreementError on rank 0, which ends
        the others."""
        ends = accumulate(len(request.token_ids) for request in batch.requests)
        rows = prefix[[end - 1 for end in ends]].cpu().contiguous().view(torch.uint8)
        digest = zlib.crc32(rows.numpy().tobytes(), self._told)
        digests = self._gather(torch.tensor([[digest]], dtype=torch.int64)).flatten().tolist()
        odd = odd_ranks(digests)
        if odd and self._ranks.is_leader:
            raise DisagreementError(odd[0], digests)


def odd_ranks(digests: Sequence[int]) -> list[int]:
    """Ranks that differ from most of the others; from rank 0 where there is no majority."""
    (common, count), *_ = Counter(digests).most_common(1)
    if 2 * count <= len(digests):
        common = digests[0]
    return [rank for rank, digest in enumerate(digests) if digest != common]
