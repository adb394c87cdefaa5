"""Engines whose model several processes share say what one rank says, whatever the requests do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from proposers import Observed, Scripted, inner, use, without_drafts
from ranked_engines import (
    MAX_DISTANCE,
    PROMPTS,
    Single,
    build,
    distance,
    greedy,
    sharing,
    with_draft,
)

from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.engine.engine import LLM
from kdecode.model.rank_share import share_of
from kdecode.speculative.types import Proposal, RoundRequest

K3, LINEAR = "mini_16_checkpoint", "mini_linear_16_checkpoint"
# Model, backend, ranks, settings of ranks that share positions; and of one rank, too.
FP8 = {"cache_dtype": "fp8", "cache_scale": 0.05}
CASES = [
    pytest.param((K3, "latency_specialized", 2, {}, {}), id="k3-latency-2"),
    pytest.param((K3, "latency_specialized", 2, sharing(2, 1), {}), id="k3-latency-2-shared"),
    pytest.param((K3, "auto", 2, {}, {}), id="k3-auto-2", marks=pytest.mark.slow),
    *(
        pytest.param(
            (model, backend, size, sharing(size, interleave), more),
            id=f"{model}-{backend}-{size}-shared-{interleave}-{'fp8' if more is FP8 else 'bf16'}",
            marks=pytest.mark.slow,
        )
        for model, backend, size, interleave, more in (
            (K3, "auto", 2, 16, {}),
            (K3, "auto", 4, 1, FP8),
            (K3, "latency_specialized", 4, 16, FP8),
            # Pages of 64 positions: the prefix that is found ends on one.
            (K3, "latency_specialized", 8, 1, {"page_tokens": 8}),
        )
    ),
]
SIZES = [
    pytest.param((K3, "auto", 2), id="k3-auto-2"),
    pytest.param((LINEAR, "latency_specialized", 4), id="linear-latency-4"),
    *(
        pytest.param((model, backend, size), id=f"{model}-{backend}-{size}", marks=pytest.mark.slow)
        for model in (K3, LINEAR)
        for backend in ("auto", "latency_specialized")
        for size in (2, 4, 8, 16)
    ),
]
SHARED = [
    pytest.param((K3, "auto", 2, 1), id="k3-auto-2-1"),
    *(
        pytest.param(
            (model, backend, size, interleave),
            id=f"{model}-{backend}-{size}-{interleave}",
            marks=pytest.mark.slow,
        )
        for model in (K3, LINEAR)
        for backend in ("auto", "latency_specialized")
        for size in (2, 4, 8)
        for interleave in (1, 16)
    ),
]
_SINGLES: dict[tuple[str, str, str], Single] = {}


def _single(request: pytest.FixtureRequest, model: str, backend: str, **settings: object) -> Single:
    key = model, backend, str(settings)
    if key not in _SINGLES:
        _SINGLES[key] = Single.of(request.getfixturevalue(model), backend, **settings)
    return _SINGLES[key]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, Single]]:
    """Ranks with a draft and a prefix cache, and one rank without."""
    model, backend, size, shared, more = request.param
    checkpoint: Path = request.getfixturevalue(model)
    settings = {"speculative": with_draft(checkpoint), "enable_prefix_caching": True}
    with build(checkpoint, backend, size, **settings, **shared, **more) as llm:
        yield llm, _single(request, model, backend, **more)


def _without_drafts(llm: LLM) -> None:
    without_drafts(llm)
    llm.reset_prefix_cache()


def _with_drafts(llm: LLM, num_drafts: int = 3) -> None:
    scheduler = llm.loop.scheduler
    scheduler._limits = replace(scheduler._limits, num_drafts=num_drafts)
    llm.reset_prefix_cache()


@pytest.mark.parametrize("case", SIZES)
def test_any_number_of_ranks_says_what_one_says(
    request: pytest.FixtureRequest, case: tuple[str, str, int]
) -> None:
    model, backend, size = case
    single = _single(request, model, backend)
    with build(request.getfixturevalue(model), backend, size) as llm:
        outputs = llm.generate(PROMPTS, greedy())
        logits = [llm.teacher_forced(*p) for p in zip(PROMPTS, single.replies, strict=True)]
        assert llm.stats()["coverage"] == (1.0 if backend == "latency_specialized" else 0.0)
        resolved = llm.resolved_config()
    assert single.near_ties(outputs) <= len(PROMPTS)
    for ours, theirs in zip(logits, single.logits, strict=True):
        assert distance(ours, theirs) < MAX_DISTANCE
    assert resolved["tensor_parallel_size"] == size
    assert single.llm.resolved_config()["tensor_parallel_size"] == 1


@pytest.mark.parametrize("case", SHARED)
def test_ranks_that_share_positions_say_what_one_says(
    request: pytest.FixtureRequest, case: tuple[str, str, int, int]
) -> None:
    """Prompts and replies go over the borders of pages."""
    model, backend, size, interleave = case
    single = _single(request, model, backend)
    shared = sharing(size, interleave)
    with build(request.getfixturevalue(model), backend, size, **shared) as llm:
        outputs = llm.generate(PROMPTS, greedy())
        logits = [llm.teacher_forced(*p) for p in zip(PROMPTS, single.replies, strict=True)]
        resolved, share = llm.resolved_config(), llm.model_config
    assert single.near_ties(outputs) <= len(PROMPTS)
    for ours, theirs in zip(logits, single.logits, strict=True):
        assert distance(ours, theirs) < MAX_DISTANCE
    cache = resolved["cache"]
    assert (cache["page_tokens"], cache["pages"]) == (16 * size, 3 * -(-128 // (16 * size)))
    # Slots are divided by heads; a page has as many bytes as it would have on one rank.
    slots = 3 * slot_bytes(share_of(single.llm.model_config, size))
    assert cache["bytes"] == slots + cache["pages"] * page_bytes(share, 16, "bf16")
    assert resolved["context_interleave_tokens"] == interleave


def test_requests_together_and_alone(pair: tuple[LLM, Single]) -> None:
    llm, single = pair
    _without_drafts(llm)
    together = llm.generate(PROMPTS, greedy())
    assert single.near_ties(together) <= len(PROMPTS)
    llm.reset_prefix_cache()
    alone = [llm.generate([prompt], greedy())[0] for prompt in PROMPTS]
    # The same ranks: not one bit differs.
    assert [o.token_ids for o in alone] == [o.token_ids for o in together]


def test_a_prefix_that_is_found_has_the_bits_of_one_that_is_not(pair: tuple[LLM, Single]) -> None:
    llm, single = pair
    _without_drafts(llm)
    prompt, reply = PROMPTS[2], single.replies[2]
    miss = llm.teacher_forced(prompt, reply)
    hits = llm.stats()["prefix_cache"]["hits"]
    hit = llm.teacher_forced(prompt, reply)
    assert llm.stats()["prefix_cache"]["hits"] == hits + 64
    assert torch.equal(hit, miss)


def test_drafts_of_a_random_model_change_nothing(pair: tuple[LLM, Single]) -> None:
    llm, single = pair
    _with_drafts(llm)
    rounds = llm.stats()["speculation"]["rounds"]
    outputs = llm.generate(PROMPTS, greedy())
    assert llm.stats()["speculation"]["rounds"] > rounds
    assert single.near_ties(outputs) <= len(PROMPTS)


class _SelfDraft(Observed):
    """The target as its own draft: it follows what these ranks said before, without drafts."""

    def __init__(self, llm: LLM, first: int, replies: Sequence[Sequence[int]]) -> None:
        super().__init__(inner(llm))
        self._first, self._replies = first, replies

    def propose(self, requests: Sequence[RoundRequest]) -> list[Proposal]:
        proposals = []
        for request in requests:
            number = request.number - self._first
            place = request.anchor_position + 1 - len(PROMPTS[number])
            drafts = tuple(self._replies[number][place : place + request.num_drafts])
            proposals.append(Proposal(request.anchor_position, drafts))
        return proposals


def test_drafts_that_are_right_or_wrong_by_turns_change_nothing(
    pair: tuple[LLM, Single],
) -> None:
    llm, single = pair
    _without_drafts(llm)
    plain = llm.generate(PROMPTS, greedy())
    _with_drafts(llm)
    own = llm._worker.speculation
    try:
        first = llm._num_requests
        use(llm, _SelfDraft(llm, first, [output.token_ids for output in plain]))
        outputs = llm.generate(PROMPTS, greedy())
        assert single.near_ties(outputs) <= len(PROMPTS)
        # Nearly every draft holds, so that rows are committed in every number.
        assert max(output.rounds.accepted / output.rounds.rounds for output in outputs) > 1.5
        llm._worker.speculation = own
        first = llm._num_requests
        script = Scripted(
            inner(llm),
            replies={first + n: output.token_ids for n, output in enumerate(plain)},
            prompts={first + n: len(prompt) for n, prompt in enumerate(PROMPTS)},
        )
        use(llm, script)
        llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, greedy())
        assert single.near_ties(outputs) <= len(PROMPTS)
        assert {right for _, right, _ in script.rounds} == {0, 1, 2, 3}
    finally:
        llm._worker.speculation = own


def test_an_aborted_request_leaves_the_others_as_they_are(pair: tuple[LLM, Single]) -> None:
    llm, single = pair
    _with_drafts(llm)
    stream = llm.stream(PROMPTS[0], greedy(40))
    # Aborted among its decode steps, on slots that the next requests get.
    for _ in range(5):
        next(stream)
    stream.close()
    assert llm.stats()["slots_used"] == 0
    assert single.near_ties(llm.generate(PROMPTS, greedy())) <= len(PROMPTS)


def test_preempted_requests_say_what_they_would_have_said(request: pytest.FixtureRequest) -> None:
    """Pages for a request and a half: others go back to the queue, on every rank alike."""
    model, backend = K3, "latency_specialized"
    single = _single(request, model, backend)
    share = share_of(single.llm.model_config, 2)
    budget = 3 * slot_bytes(share) + 12 * page_bytes(share, 16, "bf16")
    with build(request.getfixturevalue(model), backend, 2, cache_budget_bytes=budget) as llm:
        outputs = llm.generate(PROMPTS, greedy(24))
        assert llm.stats()["preemptions"] > 0
        assert single.near_ties(outputs) <= len(PROMPTS)


@pytest.mark.slow
def test_verification_adapts_to_costs_that_all_ranks_were_timed_for(
    request: pytest.FixtureRequest,
) -> None:
    checkpoint: Path = request.getfixturevalue(K3)
    config = with_draft(checkpoint, enable_adaptive_verification=True)
    single = _single(request, K3, "latency_specialized")
    with build(checkpoint, "latency_specialized", 2, speculative=config) as llm:
        assert llm._worker.speculation is not None
        assert llm._worker.speculation.costs is not None
        assert single.near_ties(llm.generate(PROMPTS, greedy())) <= len(PROMPTS)
