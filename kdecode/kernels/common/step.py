"""Derived metadata of one step, as tensors: what the ops of the standard path read.

`decode/auto.py` derives it from a `StepBatch`, once a step; a later step never sees it. Knows no
requests' life cycles and no caches: slots, pages and cache rows are numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# A request with more new tokens than a verify step has is left to what is made for prompts.
MAX_DECODE_ROWS = 8


@dataclass(frozen=True)
class RequestSpan:
    """The rows [first, last) of one request, and where its caches are.

    start: tokens cached before this step. pages: int64 page numbers of its start + (last - first)
    tokens, no more. first_page: the first of them when they are consecutive, else None. is_verify:
    the KDA slot is only read, and what each row would do to it is recorded.
    """

    first: int
    last: int
    start: int
    slot: int
    pages: Tensor
    first_page: int | None
    is_verify: bool = False

    @property
    def num_rows(self) -> int:
        return self.last - self.first

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache once this step's are inserted."""
        return self.start + self.num_rows


@dataclass(frozen=True)
class DecodeRows:
    """Rows of requests with few new tokens, as kernels read them that take a line for each row.

    index: int64, which rows of the step they are; None when they are all of them. each: rows of
    every request, which follow each other; 1 where their number differs. position [n] and pages
    [n, widest], int32: as the inputs of a static plan, pages -1 where there are no more.
    """

    index: Tensor | None
    each: int
    position: Tensor
    pages: Tensor

    @property
    def count(self) -> int:
        return self.position.shape[0]


@dataclass(frozen=True)
class RowEffects:
    """What rows of a verify step would do to slots of one KDA layer, a slot's oldest first.

    keys [R, H, K] fp32 after their norm, decays [R, H, K] fp32 in the log domain, corrections
    [R, H, V] fp32 (u of the delta rule), samples [R, 3D] bf16, the convolution's raw input.
    """

    keys: Tensor
    decays: Tensor
    corrections: Tensor
    samples: Tensor


@dataclass(frozen=True)
class StepTensors:
    """Index tensors are int64, on the plan's device.

    token_ids: one a row [R]. cache_rows (page * rows of a page + place): where the rows go that are
    cached here: stored_rows of the step, or all [R] where that is None. Requests with one new token
    are ``single`` whatever their phase, those that are verified and the others ``multi``;
    ``single_rows`` and ``single_slots`` [len(single)] are the former's rows and slots. logits_rows:
    the last row of every request that needs logits, or all of its rows. decode_rows: those of the
    requests with up to `MAX_DECODE_ROWS`, on devices that have kernels for them; None elsewhere and
    where there is no such request.
    """

    num_rows: int
    token_ids: Tensor
    cache_rows: Tensor
    single: tuple[RequestSpan, ...]
    multi: tuple[RequestSpan, ...]
    single_rows: Tensor
    single_slots: Tensor
    logits_rows: Tensor
    num_logits: int
    decode_rows: DecodeRows | None = None
    stored_rows: Tensor | None = None
