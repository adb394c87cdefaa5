"""Prefixes, ranks and fairness in the scheduler, over caches whose contents can be checked.

The fake model's pages hold the tokens themselves and its state is a hash of all of them, so that
every step can tell whether pages and state are those of its request. What is free is poisoned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import NoText

from kdecode.cache.caches import Caches
from kdecode.cache.pool import IndexPool
from kdecode.cache.prefix import PrefixCache
from kdecode.engine.loop import StepLoop, StepResult
from kdecode.engine.request import Request, SamplingParams, Timing
from kdecode.engine.sampling import Choice
from kdecode.engine.scheduler import MAX_OVERTAKEN, ScheduledStep, Scheduler, SchedulerLimits
from kdecode.engine.text import TextStream

PAGE, INTERVAL, VOCAB = 4, 8, 50
POISON = -7


def fold(state: int, tokens: Iterable[int]) -> int:
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
    return state


def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    state, reply = fold(0, prompt), list[int]()
    for _ in range(max_tokens):
        reply.append(state % VOCAB)
        state = fold(state, reply[-1:])
    return reply


class CheckingWorker:
    """Fails when a step's pages or slot are not those of its tokens."""

    def __init__(self, caches: Caches) -> None:
        self.rows, self.states = caches.pages[0], caches.recurrent[1]
        self.steps: list[ScheduledStep] = []
        self.breaks_at: set[int] = set()

    def execute(self, step: ScheduledStep) -> StepResult:
        self.steps.append(step)
        choices = []
        for share, part in zip(step.shares, step.batch.requests, strict=True):
            cached = [int(self.rows[part.pages[i // PAGE], i % PAGE]) for i in range(part.start)]
            known = (*share.request.prompt_ids, *share.request.output_ids)
            assert cached == list(known[: part.start])
            state = int(self.states[part.slot])
            assert state == fold(0, cached)
            for i, token in enumerate(part.token_ids, start=part.start):
                self.rows[part.pages[i // PAGE], i % PAGE] = token
            self.states[part.slot] = fold(state, part.token_ids)
            if share.has_choice:
                token = int(self.states[part.slot]) % VOCAB
                choices.append(Choice((token,), torch.zeros(1, VOCAB)))
        if len(self.steps) in self.breaks_at:
            raise RuntimeError("the step broke after it had moved the caches")
        return StepResult(choices, ("standard", "fake"))


class Rig:
    def __init__(
        self,
        slots: int = 4,
        pages: int = 40,
        step_tokens: int = 8,
        context: int = 80,
        states: int | None = 16,
    ) -> None:
        self.caches = Caches(
            page_tokens=PAGE,
            cache_dtype="bf16",
            conv={},
            recurrent={1: torch.full((slots,), POISON)},
            pages={0: torch.full((pages, PAGE), POISON)},
            scales={},
            slot_pool=IndexPool(slots, "KDA slot"),
            page_pool=IndexPool(pages, "MLA page"),
        )
        self._poison(self.caches.slot_pool, self.caches.recurrent[1])
        self._poison(self.caches.page_pool, self.caches.pages[0])
        self.prefix = None if states is None else PrefixCache(self.caches, INTERVAL, states)
        limits = SchedulerLimits(step_tokens, context, state_interval_tokens=INTERVAL)
        self.worker = CheckingWorker(self.caches)
        self.loop = StepLoop(Scheduler(self.caches, limits, self.prefix), self.worker)
        self.requests: list[Request] = []

    @staticmethod
    def _poison(pool: IndexPool, tensor: torch.Tensor) -> None:
        free = pool.free

        def give_back(places: Iterable[int]) -> None:
            given = tuple(places)
            free(given)
            tensor[list(given)] = POISON

        pool.free = give_back  # type: ignore[method-assign]

    def add(self, prompt: Iterable[int], max_tokens: int = 3, **settings_: Any) -> Request:
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens)
        timing = Timing(start_ns=0)
        request = Request(number, tuple(prompt), params, frozenset(), 0, timing, **settings_)
        self.loop.add(request, TextStream(NoText()))
        self.requests.append(request)
        return request

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.loop.step() and not self.loop.scheduler.has_work:
                return
        raise AssertionError(f"work is left after {limit} steps")

    def served(self, prompt: Iterable[int], max_tokens: int = 3, **settings_: Any) -> Request:
        request = self.add(prompt, max_tokens, **settings_)
        self.run()
        return request

    def assert_accounts(self) -> None:
        """Every page is free, held by a request, or idle with a name; no other is used."""
        held = [request for request in self.requests if request.slot is not None]
        assert self.caches.slot_pool.used == {request.slot for request in held}
        pages = {page for request in held for page in request.pages}
        idle = 0 if self.prefix is None else self.prefix.pages.num_idle
        assert self.caches.page_pool.num_used == len(pages) + idle
        assert pages <= self.caches.page_pool.used

    def assert_nothing_held(self) -> None:
        self.assert_accounts()
        if self.prefix is not None:
            self.prefix.clear()
        assert (self.caches.slot_pool.num_used, self.caches.page_pool.num_used) == (0, 0)


def test_a_prompt_run_twice_is_computed_from_the_last_state_on() -> None:
    rig = Rig()
    prompt = range(21)
    first, second = rig.served(prompt), rig.served(prompt)
    assert (first.num_reused, second.num_reused) == (0, 16)
    assert first.output_ids == second.output_ids == alone(tuple(prompt), 3)
    starts = [part.start for step in rig.worker.steps for part in step.batch.requests]
    # The second run begins at 16; both are cut at the same places behind it.
    assert starts == [0, 8, 16, 21, 22, 16, 21, 22]
    rig.assert_nothing_held()


def test_chunks_are_cut_at_the_same_places_without_a_cache() -> None:
    rig = Rig(states=None, step_tokens=20)
    rig.served(range(21))
    assert [step.batch.num_rows for step in rig.worker.steps] == [8, 8, 5, 1, 1]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("stored", [0, 7, 8, 16, 24, 40])
def test_predicted_counted_and_reported_hits_are_the_same(stored: int, length: int) -> None:
    rig = Rig()
    assert rig.prefix is not None
    if stored:
        rig.served(range(stored))
    rig.prefix.counts.queries = rig.prefix.counts.hits = 0
    expected = min(stored, length - 1) // INTERVAL * INTERVAL
    request = rig.served(range(length))
    computed = sum(
        len(part.token_ids)
        for step in rig.worker.steps
        for share, part in zip(step.shares, step.batch.requests, strict=True)
        if share.request is request and not part.is_decode
    )
    counts = rig.prefix.counts
    assert (request.num_reused, counts.hits, counts.queries) == (expected, expected, length)
    assert computed == length - expected
    assert rig.loop.collect(request.number).cached_tokens == expected


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_nothing_is_found_that_was_not_computed(steps: int) -> None:
    """An abort before, between and behind chunks; the same prompt again."""
    rig = Rig()
    rig.add(range(21))
    for _ in range(steps):
        rig.loop.step()
    rig.loop.abort(0)
    again = rig.served(range(21))
    assert again.num_reused == steps * 8
    assert again.output_ids == alone(tuple(range(21)), 3)


def test_a_step_that_broke_publishes_nothing() -> None:
    rig = Rig()
    rig.worker.breaks_at = {2}
    rig.served(range(21))
    assert rig.served(range(21)).num_reused == 8


def test_decoded_tokens_are_not_taken_over() -> None:
    rig = Rig()
    first = rig.served(range(9), max_tokens=30)
    grown = (*first.prompt_ids, *first.output_ids)
    assert rig.served(grown).num_reused == 8
    assert rig.served(grown).num_reused == (len(grown) - 1) // 8 * 8


def test_prefixes_are_shared_within_a_salt_only() -> None:
    rig = Rig()
    rig.served(range(21), cache_salt="a")
    assert rig.served(range(21), cache_salt="b").num_reused == 0
    assert rig.served(range(21), cache_salt="a").num_reused == 16


def test_requests_at_once_share_the_pages_of_their_prefix() -> None:
    rig = Rig(pages=12)
    rig.served(range(17))
    first, second = rig.add(range(20), max_tokens=9), rig.add((*range(17), 1, 1), max_tokens=9)
    rig.loop.step()
    rig.loop.step()
    assert first.pages[:4] == second.pages[:4]
    assert not set(first.pages[4:]) & set(second.pages[4:])
    rig.run()
    for request in (first, second):
        assert request.output_ids == alone(request.prompt_ids, 9)
    rig.assert_nothing_held()


def test_a_preempted_request_takes_its_own_prefix_over() -> None:
    rig = Rig(slots=2, pages=10, context=32)
    old, young = rig.add(range(12), 20), rig.add(range(20, 32), 20)
    rig.run()
    assert young.num_preemptions >= 1
    assert (young.num_reused, young.num_resumed) == (0, 8)
    for request in (old, young):
        assert request.output_ids == alone(request.prompt_ids, 20)
    rig.assert_nothing_held()


def test_the_lower_priority_number_is_served_first_and_preempted_last() -> None:
    rig = Rig(slots=1, states=None)
    for priority in (0, 5, -1, 5, 0):
        rig.add(range(4), priority=priority)
    order = []
    while rig.loop.scheduler.has_work:
        order += [event.number for event in rig.loop.step() if event.finish_reason]
    # The first one is not interrupted.
    assert order == [2, 0, 4, 1, 3]
    rig = Rig(slots=2, pages=8, context=32, states=None)
    low, high = rig.add(range(12), 16, priority=1), rig.add(range(12), 16)
    rig.run()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    assert low.output_ids == alone(low.prompt_ids, 16)


def test_one_that_is_preempted_by_a_later_row_is_not_in_the_step() -> None:
    rig = Rig(slots=2, pages=8, context=32, states=None)
    low = rig.add(range(12), 16, priority=1)
    rig.loop.step()
    high = rig.add(range(12), 16)
    rig.run()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    for request in (low, high):
        assert request.output_ids == alone(request.prompt_ids, 16)
    rig.assert_nothing_held()


def test_nobody_is_overtaken_for_ever() -> None:
    rig = Rig(slots=2, states=None)
    patient = rig.add(range(40), priority=9)
    while patient.state == "waiting":
        while rig.loop.scheduler.num_waiting < 4:
            rig.add(range(3), max_tokens=2)
        seen = patient.num_overtaken
        rig.loop.step()
    # The admission of the last step was its own, and perhaps one behind it.
    assert seen == MAX_OVERTAKEN
    # Past its prompt it shares steps with everyone, but those that come meanwhile do not delay it.
    while not patient.is_finished:
        rig.add(range(40), max_tokens=2)
        rig.loop.step()
        assert len(rig.worker.steps) < 400
    assert patient.output_ids == alone(patient.prompt_ids, 3)


def test_short_prompts_do_not_keep_a_long_one_out() -> None:
    """The long one needs nearly all pages, which never happen to be free by themselves."""
    rig = Rig(slots=4, pages=20, states=None)
    for _ in range(4):
        rig.add(range(12), max_tokens=8)
    rig.loop.step()
    long = rig.add(range(70), max_tokens=2)
    behind = [rig.add(range(3), max_tokens=2) for _ in range(20)]
    while long.slot is None:
        # None of them is admitted before it.
        assert {request.state for request in behind} == {"waiting"}
        rig.loop.step()
    rig.run()
    assert long.output_ids == alone(long.prompt_ids, 2)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), st.integers(0, 5), st.integers(1, 8)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("break"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("forget"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=ACTIONS,
    slots=st.integers(1, 4),
    pages=st.integers(14, 24),
    step_tokens=st.integers(4, 20),
    states=st.one_of(st.none(), st.integers(1, 6)),
)
def test_any_schedule_with_prefixes_leaks_nothing_and_changes_no_output(
    actions: list[tuple[str, int, int, int]],
    slots: int,
    pages: int,
    step_tokens: int,
    states: int | None,
) -> None:
    rig = Rig(slots, pages, step_tokens, context=56, states=states)
    for action, first, second, third in actions:
        if action == "add":
            # A common beginning of any length, then tokens of one of three kinds.
            prompt = (*range(first), *([second % 3] * second), 49)
            rig.add(prompt, third, priority=third % 3, cache_salt="x" * (second == 5))
        elif action == "step":
            for _ in range(first):
                rig.loop.step()
        elif action == "abort" and rig.requests:
            rig.loop.abort(first % len(rig.requests))
        elif action == "break":
            rig.worker.breaks_at.add(len(rig.worker.steps) + 1)
        elif action == "forget" and rig.prefix is not None:
            rig.prefix.clear()
        rig.assert_accounts()
    rig.worker.breaks_at.clear()
    rig.run()
    for request in rig.requests:
        expected = alone(request.prompt_ids, request.params.max_tokens)
        assert request.output_ids == expected[: len(request.output_ids)]
        if request.finish_reason not in ("abort", "error"):
            assert request.output_ids == expected
    rig.assert_nothing_held()
