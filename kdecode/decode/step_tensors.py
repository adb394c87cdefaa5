"""Derives a step's `StepTensors` from its `StepBatch`, once `step_check` has passed it.

Called once a step and never cached: two steps share nothing but the plan.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.budget import pages_for
from kdecode.decode.step_check import StepLimits, check_step
from kdecode.kernels.common.step import MAX_DECODE_ROWS, DecodeRows, RequestSpan, StepTensors


def derive(batch: StepBatch, limits: StepLimits, device: str) -> StepTensors:
    """Raises StepError before anything has been written."""
    check_step(batch, limits)
    tokens = [token for request in batch.requests for token in request.token_ids]
    spans, first = [], 0
    for request in batch.requests:
        spans.append(_span(request, first, limits.page_tokens, device))
        first = spans[-1].last
    cache_rows, stored_rows = _cache_rows(spans, limits)
    single = tuple(span for span in spans if span.num_rows == 1 and not span.is_verify)
    logits = [
        row
        for span, request in zip(spans, batch.requests, strict=True)
        if request.needs_logits
        for row in range(span.first if request.all_logits else span.last - 1, span.last)
    ]
    return StepTensors(
        num_rows=first,
        token_ids=_index(tokens, device),
        cache_rows=cache_rows,
        stored_rows=stored_rows,
        single=single,
        multi=tuple(span for span in spans if span.num_rows > 1 or span.is_verify),
        single_rows=_index([span.first for span in single], device),
        single_slots=_index([span.slot for span in single], device),
        logits_rows=_index(logits, device),
        num_logits=len(logits),
        decode_rows=None if device == "cpu" else decode_rows(batch, limits, device),
    )


def decode_rows(batch: StepBatch, limits: StepLimits, device: str) -> DecodeRows | None:
    """The rows of the requests with few new tokens; None if there are none."""
    counts = [len(request.token_ids) for request in batch.requests]
    firsts = np.cumsum([0, *counts])
    few = [n for n, count in enumerate(counts) if count <= MAX_DECODE_ROWS]
    if not few:
        return None
    requests = [batch.requests[number] for number in few]
    ends = [request.start + len(request.token_ids) for request in requests]
    widest = max(pages_for(end, limits.page_tokens) for end in ends)
    position: list[int] = []
    rows: list[int] = []
    pages = []
    for number, request, end in zip(few, requests, ends, strict=True):
        line = np.full(widest, -1, dtype=np.int32)
        own = request.pages[: pages_for(end, limits.page_tokens)]
        line[: len(own)] = own
        position += range(request.start, end)
        rows += range(firsts[number], firsts[number + 1])
        pages += [line] * counts[number]
    each = {counts[number] for number in few}
    return DecodeRows(
        index=None if len(few) == len(counts) else _index(rows, device),
        each=each.pop() if len(each) == 1 else 1,
        position=torch.tensor(position, dtype=torch.int32, device=device),
        pages=torch.from_numpy(np.stack(pages)).to(device),
    )


def _span(request: StepRequest, first: int, page_tokens: int, device: str) -> RequestSpan:
    end = request.start + len(request.token_ids)
    pages = request.pages[: pages_for(end, page_tokens)]
    is_run = bool(pages) and pages == tuple(range(pages[0], pages[0] + len(pages)))
    return RequestSpan(
        first=first,
        last=first + len(request.token_ids),
        start=request.start,
        slot=request.slot,
        pages=_index(pages, device),
        first_page=pages[0] if is_run else None,
        is_verify=request.is_verify,
    )


def _cache_rows(spans: list[RequestSpan], limits: StepLimits) -> tuple[Tensor, Tensor | None]:
    """Where the rows of a step go that are stored here, and which ones; None where all are."""
    context = limits.context
    rows = torch.cat([_places(span, limits) for span in spans])
    if context.is_whole:
        return rows, None
    positions = torch.cat([_positions(span) for span in spans])
    stored = torch.nonzero(context.owner(positions) == context.ranks.rank).flatten()
    return rows[stored], stored


def _places(span: RequestSpan, limits: StepLimits) -> Tensor:
    """Of each row of a request, on the rank that stores it: page * rows of a page + place [T]."""
    positions = _positions(span)
    if not span.pages.numel():
        return positions  # a model without MLA layers
    page_rows = limits.context.page_rows(limits.page_tokens)
    place = limits.context.index(positions) % page_rows
    return span.pages[positions // limits.page_tokens] * page_rows + place


def _positions(span: RequestSpan) -> Tensor:
    return torch.arange(span.start, span.context_tokens, device=span.pages.device)


def _index(values: tuple[int, ...] | list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
