"""Which steps prepared plans serve: their sizes, and why one is left to the standard forward.

Owns both, from an engine's settings and the state of a step's requests. Knows no plan.
"""

from __future__ import annotations

from kdecode.cache.batch import StepBatch
from kdecode.config import EngineConfig
from kdecode.decode.latency_specialized import ROW_BUCKETS
from kdecode.kernels.common.native import MAX_ROWS

# Decode steps of up to so many rows get plans in every engine.
_FEWEST_BUCKETS = 8


def decline_reason(
    batch: StepBatch,
    buckets: tuple[int, ...] = ROW_BUCKETS,
    verify_rows: tuple[int, ...] = (),
    max_requests: int = MAX_ROWS,
) -> str | None:
    """Why the prepared plans do not serve this step; None when one does.

    Looks at each request's state, never at token counts alone: a prompt of one token is a prefill.
    verify_rows: rows of one request of the plans of verify steps; max_requests: of one of them.
    """
    decoding = [request.is_decode for request in batch.requests]
    if not any(decoding):
        return "prefill"
    if not all(decoding):
        return "mixed prefill and decode"
    verifying = [request.is_verify for request in batch.requests]
    if any(verifying):
        if not all(verifying):
            return "requests with and without drafts"
        counts = {len(request.token_ids) for request in batch.requests}
        if len(counts) > 1:
            return "uneven drafts"
        (rows_per_request,) = counts
        if rows_per_request not in verify_rows:
            return "a number of drafts without a plan"
        most = most_verify_rows(rows_per_request, max_requests)
        return _rows_reason(batch, batch.num_rows <= most, most)
    elif any(len(request.token_ids) != 1 for request in batch.requests):
        return "more than one token a request"
    return _rows_reason(batch, batch.num_rows in buckets, buckets[-1])


def _rows_reason(batch: StepBatch, has_plan: bool, most: int) -> str | None:
    for request in batch.requests:
        if not request.needs_logits or (request.is_verify and not request.all_logits):
            return "a decode row without logits"
    return None if has_plan else f"rows above {most}"


def row_buckets(engine: EngineConfig) -> tuple[int, ...]:
    """Rows of the decode steps that get plans: as many as the engine has requests."""
    most = max(_FEWEST_BUCKETS, engine.max_requests)
    return tuple(rows for rows in ROW_BUCKETS if rows <= most)


def plan_sizes(
    buckets: tuple[int, ...], verify_rows: tuple[int, ...], max_requests: int
) -> list[tuple[int, int]]:
    """(rows, rows of one request) of every prepared plan.

    buckets: rows of plain decode steps. max_requests: of one verify step.
    """
    sizes = [(rows, 1) for rows in buckets]
    for each in verify_rows:
        most = most_verify_rows(each, max_requests)
        sizes += [(rows, each) for rows in range(each, most + 1, each)]
    return sizes


def most_verify_rows(rows_per_request: int, max_requests: int) -> int:
    """Rows of the largest prepared verify step."""
    return rows_per_request * min(max_requests, MAX_ROWS // rows_per_request)
