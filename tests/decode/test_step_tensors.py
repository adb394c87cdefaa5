"""What a step may name: refused before anything is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from auto_cases import PAGE_TOKENS, Session, make_model

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.decode.auto import run_standard
from kdecode.decode.step_check import StepError
from kdecode.decode.step_tensors import derive
from kdecode.parallel.context import ContextShare
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import bit_equal

GOOD = StepRequest((3, 4), start=0, slot=1, pages=(2, 0), is_decode=False)


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(make_model("k3"), num_slots=3, num_pages=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": (3, -1)}, "Token 1 of request 0 is -1; ids of the vocabulary are 0 to 95"),
        ({"token_ids": (96,)}, "Token 0 of request 0 is 96"),
        ({"token_ids": ()}, "Request 0 of the step has no tokens"),
        ({"slot": -1}, "KDA slot -1 of request 0 does not exist; there are 3"),
        ({"slot": 3}, "KDA slot 3"),
        ({"pages": (-1,)}, "MLA page -1 of request 0 does not exist; there are 6"),
        ({"pages": (6,)}, "MLA page 6"),
        ({"start": 15}, None),
        ({"start": 31}, "has 2 pages of 16 tokens; 33 tokens need 3"),
        ({"start": 15, "pages": (2, 2)}, "MLA page 2 of request 0 is used twice"),
        ({"start": -1}, "starts at position -1"),
    ],
)
def test_a_bad_request_leaves_every_bit(
    session: Session, change: dict[str, object], message: str | None
) -> None:
    batch = StepBatch((replace(GOOD, **change),))  # type: ignore[arg-type]
    if message is None:
        derive(batch, session.plan.buffers.limits, "cpu")
        return
    before = [pool.clone() for pool in session.pools]
    with pytest.raises(StepError, match=message):
        run_standard(session.plan, batch)
    for pool, old in zip(session.pools, before, strict=True):
        bit_equal(pool, old, "a pool")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (StepRequest((1,), 0, 1, (3,), False), "KDA slot 1 of request 1 is used twice"),
        (StepRequest((1,), 0, 2, (2,), False), "MLA page 2 of request 1 is used twice"),
    ],
)
def test_two_requests_share_nothing(session: Session, other: StepRequest, message: str) -> None:
    with pytest.raises(StepError, match=message):
        derive(StepBatch((GOOD, other)), session.plan.buffers.limits, "cpu")


def test_two_requests_share_pages_that_are_full_and_no_others(session: Session) -> None:
    """Pages have 16 tokens: the first request reads page 3 and writes page 4."""
    limits = session.plan.buffers.limits
    first = StepRequest((1,), 16, 0, (3, 4), True)
    derive(StepBatch((first, StepRequest((1,), 17, 1, (3, 5), True))), limits, "cpu")
    for other, page in (
        (StepRequest((1,), 17, 1, (3, 4), True), 4),
        (StepRequest((1,), 17, 1, (4, 5), True), 4),
        (StepRequest((1,), 17, 1, (5, 3), True), 3),
        (StepRequest((1,), 15, 1, (3,), True), 3),
    ):
        for pair in ((first, other), (other, first)):
            with pytest.raises(StepError, match=f"MLA page {page} of request 1 is used twice"):
                derive(StepBatch(pair), limits, "cpu")


def test_an_empty_step_is_refused(session: Session) -> None:
    with pytest.raises(StepError, match="at least one request"):
        derive(StepBatch(()), session.plan.buffers.limits, "cpu")


def test_tensors_of_a_mixed_step(session: Session) -> None:
    batch = StepBatch(
        (
            StepRequest((5,), 16, 2, (3, 5), True),
            StepRequest((6, 7, 8), 15, 0, (1, 2), False, needs_logits=False),
            StepRequest((9,), 0, 1, (0, 4), False),
        )
    )
    step = derive(batch, session.plan.buffers.limits, "cpu")
    assert step.num_rows == 5
    assert step.token_ids.tolist() == [5, 6, 7, 8, 9]
    rows = [5 * PAGE_TOKENS, PAGE_TOKENS + 15, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1, 0]
    assert step.cache_rows.tolist() == rows
    assert [span.slot for span in step.single] == step.single_slots.tolist() == [2, 1]
    assert step.single_rows.tolist() == [0, 4]
    (chunk,) = step.multi
    assert (chunk.first, chunk.last, chunk.start, chunk.context_tokens) == (1, 4, 15, 18)
    assert chunk.pages.tolist() == [1, 2]
    assert chunk.first_page == 1
    # The third request needs one of its two pages.
    assert [span.first_page for span in step.single] == [None, 0]
    assert step.logits_rows.tolist() == [0, 4]


@pytest.mark.parametrize("interleave", [1, 4])
def test_each_row_is_stored_on_one_rank(session: Session, interleave: int) -> None:
    """Where the rank keeps it; on page borders, for rows of one request and of several."""
    batch = StepBatch(
        (
            StepRequest((5,), 31, 2, (3, 5), True),
            StepRequest(tuple(range(20)), 13, 0, (1, 2, 0), False, needs_logits=False),
        )
    )
    whole = derive(batch, session.plan.buffers.limits, "cpu").cache_rows.tolist()
    rows = {}
    for rank in range(4):
        context = ContextShare(Ranks(rank, 4), interleave)
        limits = replace(session.plan.buffers.limits, context=context)
        step = derive(batch, limits, "cpu")
        assert step.stored_rows is not None
        assert step.num_rows == 21
        for row, place in zip(step.stored_rows.tolist(), step.cache_rows.tolist(), strict=True):
            page, index = divmod(place, PAGE_TOKENS // 4)
            rows[row] = page * PAGE_TOKENS + context.position(index)
    assert [rows[row] for row in range(21)] == whole


def test_logits_are_made_for_those_who_need_them(session: Session) -> None:
    caches = session.caches
    for slot in range(3):
        caches.clear_slot(slot)
    batch = StepBatch(
        (
            StepRequest((5, 6), 0, 2, (3,), False, needs_logits=False),
            StepRequest((9,), 0, 1, (0,), False),
        )
    )
    one = run_standard(session.plan, batch)
    assert one.shape == (1, 96)
    assert one.dtype == torch.float32
    caches.clear_slot(1)
    alone = run_standard(session.plan, StepBatch(batch.requests[1:]))
    torch.testing.assert_close(one, alone, rtol=2e-2, atol=3e-2)
    caches.clear_slot(2)
    assert run_standard(session.plan, StepBatch(batch.requests[:1])).shape == (0, 96)
