"""What a step may name: the one check that stands between a `StepBatch` and memory.

Both paths call it before they write anything, so that a wrong step is the same error on either, and
native code, which follows numbers without looking at them, only sees numbers that exist. Does not
know what the step is for, nor who owns a slot or page between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.budget import pages_for
from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import ALONE, Ranks


class StepError(ValueError):
    """A step that names a token, slot or page that does not exist, or one of them twice."""


@dataclass(frozen=True)
class StepLimits:
    """What exists. num_slots and num_pages are None for a model without KDA or MLA layers.

    page_tokens: positions that a page covers. context: those of which the cache rows are here.
    """

    vocab_size: int
    num_slots: int | None
    num_pages: int | None
    page_tokens: int
    max_context_tokens: int
    context: ContextShare = WHOLE

    @staticmethod
    def of(
        config: ModelConfig, caches: Caches, max_context_tokens: int, ranks: Ranks = ALONE
    ) -> StepLimits:
        """config: of one of ``ranks``, each of which has a part of the vocabulary."""
        return StepLimits(
            vocab_size=config.vocab_size * ranks.size,
            num_slots=caches.num_slots if caches.conv else None,
            num_pages=caches.num_pages if caches.pages else None,
            page_tokens=caches.page_tokens,
            max_context_tokens=max_context_tokens,
            context=caches.context,
        )


def check_step(batch: StepBatch, limits: StepLimits) -> None:
    """Raises StepError unless every token, position, slot and page exists, and places once.

    Only pages that are full before the step may be named by several requests: they share a prefix.
    """
    if not batch.requests:
        raise StepError("A step needs at least one request.")
    slots, full, written = set[int](), set[int](), set[int]()
    for number, request in enumerate(batch.requests):
        end = _check_tokens(number, request, limits)
        if limits.num_slots is not None:
            slot = request.slot
            if not 0 <= slot < limits.num_slots or slot in slots:
                raise _bad_place("KDA slot", (slot,), limits.num_slots, slots, number)
            slots.add(slot)
        if limits.num_pages is None:
            continue
        needed = pages_for(end, limits.page_tokens)
        if len(request.pages) < needed:
            raise StepError(
                f"Request {number} has {len(request.pages)} pages of {limits.page_tokens} tokens; "
                f"{end} tokens need {needed}."
            )
        used = request.pages[:needed]
        num_full = request.start // limits.page_tokens
        own, own_written = set(used), set(used[num_full:])
        is_valid = min(used) >= 0 and max(used) < limits.num_pages and len(own) == needed
        if not (is_valid and own.isdisjoint(written) and own_written.isdisjoint(full)):
            earlier = written | (own_written & full)
            raise _bad_place("MLA page", used, limits.num_pages, earlier, number)
        full.update(used[:num_full])
        written |= own_written


def _check_tokens(number: int, request: StepRequest, limits: StepLimits) -> int:
    """The request's tokens once the step has run."""
    ids = request.token_ids
    if not ids:
        raise StepError(f"Request {number} of the step has no tokens.")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i, token in enumerate(ids) if not 0 <= token < limits.vocab_size)
        raise StepError(
            f"Token {bad} of request {number} is {ids[bad]}; ids of the vocabulary are 0 to "
            f"{limits.vocab_size - 1}."
        )
    if request.start < 0:
        raise StepError(f"Request {number} of the step starts at position {request.start}.")
    end = request.start + len(ids)
    if end > limits.max_context_tokens:
        raise StepError(
            f"Request {number} would have {end} tokens after the step; max_context_tokens is "
            f"{limits.max_context_tokens}."
        )
    return end


def _bad_place(
    noun: str, places: tuple[int, ...], size: int, earlier: set[int], number: int
) -> StepError:
    """The error of the first of a request's places that does not exist or was named before."""
    claimed = set(earlier)
    for place in places:
        if not 0 <= place < size:
            return StepError(
                f"The {noun} {place} of request {number} does not exist; there are {size}."
            )
        if place in claimed:
            break
        claimed.add(place)
    return StepError(f"The {noun} {place} of request {number} is used twice in one step.")
