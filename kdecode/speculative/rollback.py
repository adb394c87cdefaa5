"""How rejected rows leave the target's caches: two forms of one interface.

`Deferred`: the step only reads the KDA slots, and `Caches.commit` moves them past the rows that
stay. `Recomputation`, the oracle of it: the slots return to a copy from before the step, and the
committed tokens run once more, without logits, which costs a second step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.speculative.checkpoint import SlotCheckpoints
from kdecode.speculative.types import check_kept


class Deferred:
    """A `Rollback`. An interrupted round leaves the slots as they were before it."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def before(self, batch: StepBatch) -> StepBatch:
        """Requests without drafts run plainly: there is nothing to decide about them."""
        return StepBatch(
            tuple(
                replace(request, is_verify=len(request.token_ids) > 1) for request in batch.requests
            )
        )

    def keep(self, batch: StepBatch, rows: Sequence[int]) -> None:
        check_kept(batch, rows)
        kept = {
            request.slot: count
            for request, count in zip(batch.requests, rows, strict=True)
            if request.is_verify
        }
        self._caches.commit(kept)


class Recomputation:
    """A `Rollback`. rerun: runs a step again whose tokens have been counted already."""

    def __init__(self, rerun: Callable[[StepBatch], object], caches: Caches) -> None:
        self._rerun = rerun
        self._checkpoints = SlotCheckpoints(caches)

    def before(self, batch: StepBatch) -> StepBatch:
        for request in batch.requests:
            if len(request.token_ids) > 1:
                self._checkpoints.save(request.slot, request.start)
        return batch

    def keep(self, batch: StepBatch, rows: Sequence[int]) -> None:
        check_kept(batch, rows)
        rejected = []
        for request, count in zip(batch.requests, rows, strict=True):
            if count < len(request.token_ids):
                self._checkpoints.restore(request.slot, request.start)
                kept = request.token_ids[:count]
                rejected.append(
                    replace(request, token_ids=kept, needs_logits=False, all_logits=False)
                )
        if rejected:
            self._rerun(StepBatch(tuple(rejected)))
