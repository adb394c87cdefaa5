"""What rank 0 sends to the other ranks: one ordered stream, from which they only carry out.

Owns the operations that are the engine's own; those of the caches are `cache/mirror.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.cache.batch import StepBatch
from kdecode.cache.mirror import CacheOperation


@dataclass(frozen=True)
class RunStep:
    """One forward of every rank; the ranks exchange values inside of it."""

    batch: StepBatch


Operation = CacheOperation | RunStep


def describe(batch: StepBatch) -> str:
    """A step as messages name it: "decode, 2 rows"."""
    if any(request.is_verify for request in batch.requests):
        kind = "verify"
    elif all(request.is_decode for request in batch.requests):
        kind = "decode"
    elif any(request.is_decode for request in batch.requests):
        kind = "prefill and decode"
    else:
        kind = "prefill"
    return f"{kind}, {batch.num_rows} row{'s' if batch.num_rows > 1 else ''}"
