"""Rejected rows taken back by recomputation: the oracle of every faster form.

The KDA slots return to the checkpoint from before the step, and the committed tokens run once more,
without logits; that also overwrites their MLA rows. It costs a second step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.speculative.checkpoint import SlotCheckpoints
from kdecode.speculative.types import check_kept


class Recomputation:
    """A `Rollback`. rerun: runs a step again whose tokens have been counted already."""

    def __init__(self, rerun: Callable[[StepBatch], object], caches: Caches) -> None:
        self._rerun = rerun
        self._checkpoints = SlotCheckpoints(caches)

    def before(self, batch: StepBatch) -> None:
        for request in batch.requests:
            if len(request.token_ids) > 1:
                self._checkpoints.save(request.slot, request.start)

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
