"""Which path serves a step, and why: decided from the requests' state."""

from __future__ import annotations

import pytest

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.decode.runner import STANDARD, StepStats
from kdecode.decode.served_steps import decline_reason


def _request(tokens: int, *, is_decode: bool, start: int = 5, logits: bool = True) -> StepRequest:
    return StepRequest(
        token_ids=tuple(range(tokens)),
        start=start,
        slot=0,
        pages=(0,),
        is_decode=is_decode,
        needs_logits=logits,
    )


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([_request(1, is_decode=True)], None),
        ([_request(1, is_decode=True)] * 8, None),
        ([_request(1, is_decode=True)] * 64, None),
        ([_request(1, is_decode=True)] * 65, "rows above 64"),
        ([_request(7, is_decode=False)], "prefill"),
        # A prompt of one token, and a first chunk of one token, are prefills.
        ([_request(1, is_decode=False, start=0)], "prefill"),
        ([_request(1, is_decode=False, start=0, logits=False)], "prefill"),
        (
            [_request(1, is_decode=True), _request(1, is_decode=False)],
            "mixed prefill and decode",
        ),
        ([_request(2, is_decode=True)], "more than one token a request"),
        ([_request(1, is_decode=True, logits=False)], "a decode row without logits"),
    ],
)
def test_decline_reason(requests: list[StepRequest], reason: str | None) -> None:
    assert decline_reason(StepBatch(tuple(requests))) == reason


def test_coverage_is_unknown_before_the_first_decode_step() -> None:
    assert StepStats().coverage is None


def test_coverage_counts_every_standard_decode_step() -> None:
    stats = StepStats()
    stats.decode_steps[("specialized", "")] += 3
    stats.decode_steps[(STANDARD, "mixed prefill and decode")] += 1
    assert stats.coverage == 0.75
