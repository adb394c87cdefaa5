"""Derives a step's `StepTensors` from its `StepBatch`, and refuses what no step may contain.

Called once a step and never cached: two steps share nothing but the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.budget import pages_for
from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.kernels.common.step import RequestSpan, StepTensors


class StepError(ValueError):
    """A step that names a token, slot or page that does not exist, or one of them twice."""


def derive(batch: StepBatch, config: ModelConfig, caches: Caches, device: str) -> StepTensors:
    """Raises StepError before anything has been written."""
    if not batch.requests:
        raise StepError("A step needs at least one request.")
    tokens = [token for request in batch.requests for token in request.token_ids]
    _check_tokens(tokens, config.vocab_size)
    _check_places(batch, config, caches)
    spans, cache_rows, first = [], [], 0
    for request in batch.requests:
        span = _span(request, first, caches.page_tokens, device)
        spans.append(span)
        cache_rows.append(_cache_rows(span, caches.page_tokens))
        first = span.last
    single = tuple(span for span in spans if span.num_rows == 1)
    logits = [
        span.last - 1
        for span, request in zip(spans, batch.requests, strict=True)
        if request.needs_logits
    ]
    return StepTensors(
        num_rows=first,
        token_ids=_index(tokens, device),
        cache_rows=torch.cat(cache_rows),
        single=single,
        multi=tuple(span for span in spans if span.num_rows > 1),
        single_rows=_index([span.first for span in single], device),
        single_slots=_index([span.slot for span in single], device),
        logits_rows=_index(logits, device),
        num_logits=len(logits),
    )


def _check_tokens(tokens: list[int], vocab_size: int) -> None:
    if min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab_size:
        return
    row = next(row for row, token in enumerate(tokens) if not 0 <= token < vocab_size)
    raise StepError(
        f"Row {row} has token id {tokens[row]}; ids of the vocabulary are 0 to {vocab_size - 1}."
    )


def _check_places(batch: StepBatch, config: ModelConfig, caches: Caches) -> None:
    """Every slot and page exists and belongs to one request of the step only."""
    has_slots, has_pages = bool(caches.conv), bool(caches.pages)
    slots, pages = set[int](), set[int]()
    for number, request in enumerate(batch.requests):
        if not request.token_ids:
            raise StepError(f"Request {number} of the step has no tokens.")
        if request.start < 0:
            raise StepError(f"Request {number} of the step starts at position {request.start}.")
        if has_slots:
            _claim(request.slot, caches.num_slots, slots, f"request {number}", "KDA slot")
        if not has_pages:
            continue
        end = request.start + len(request.token_ids)
        needed = pages_for(end, caches.page_tokens)
        if len(request.pages) < needed:
            raise StepError(
                f"Request {number} has {len(request.pages)} pages of {caches.page_tokens} tokens; "
                f"{end} tokens need {needed}."
            )
        for page in request.pages[:needed]:
            _claim(page, caches.num_pages, pages, f"request {number}", "MLA page")


def _claim(place: int, size: int, claimed: set[int], who: str, noun: str) -> None:
    if not 0 <= place < size:
        raise StepError(f"The {noun} {place} of {who} does not exist; there are {size}.")
    if place in claimed:
        raise StepError(f"The {noun} {place} of {who} is used twice in one step.")
    claimed.add(place)


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
    )


def _cache_rows(span: RequestSpan, page_tokens: int) -> Tensor:
    """Where the rows of a request go: page * page_tokens + offset [T]."""
    positions = torch.arange(span.start, span.context_tokens, device=span.pages.device)
    if not span.pages.numel():
        return positions  # a model without MLA layers
    return span.pages[positions // page_tokens] * page_tokens + positions % page_tokens


def _index(values: tuple[int, ...] | list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
