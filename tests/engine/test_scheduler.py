"""Scheduling without a model: order, accounting, preemption, and independence of batch mates."""

from __future__ import annotations

import pytest
from engine_fakes import FakeWorker, empty_caches, make_request, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from kdecode.config import ConfigError
from kdecode.engine.loop import StepLoop
from kdecode.engine.request import Request, RequestError, SamplingParams
from kdecode.engine.scheduler import Scheduler, SchedulerLimits
from kdecode.engine.text import TextStream


class NoText:
    """A detokeniser for requests whose text does not matter."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Rig:
    """A loop over a fake worker."""

    def __init__(
        self,
        slots: int = 4,
        pages: int = 20,
        step_tokens: int = 8,
        context: int = 40,
        can_mix: bool = False,
    ) -> None:
        self.caches = empty_caches(slots, pages)
        limits = SchedulerLimits(step_tokens, context, can_mix)
        self.worker = FakeWorker()
        self.loop = StepLoop(Scheduler(self.caches, limits), self.worker)
        self.requests: list[Request] = []

    def add(self, prompt: int | tuple[int, ...], max_tokens: int = 5) -> Request:
        request = make_request(len(self.requests), prompt, max_tokens)
        self.loop.add(request, TextStream(NoText()))
        self.requests.append(request)
        return request

    def run(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not self.loop.step() and not self.loop.scheduler.has_work:
                return
        raise AssertionError(f"work is left after {limit} steps")

    def assert_nothing_held(self) -> None:
        assert self.caches.slot_pool.num_used == 0
        assert self.caches.page_pool.num_used == 0


def alone(prompt_ids: tuple[int, ...], max_tokens: int) -> list[int]:
    """What the fake model says to a prompt, whatever the scheduler does."""
    history = prompt_ids
    for _ in range(max_tokens):
        history += (next_token(history),)
    return list(history[len(prompt_ids) :])


def kinds(rig: Rig) -> list[list[tuple[int, bool, int]]]:
    """(request, is decode, tokens) of each step's shares."""
    return [
        [
            (share.request.number, part.is_decode, len(part.token_ids))
            for share, part in zip(step.shares, step.batch.requests, strict=True)
        ]
        for step in rig.worker.steps
    ]


def test_one_request_prefills_in_chunks_then_decodes() -> None:
    rig = Rig(step_tokens=8)
    request = rig.add(19, max_tokens=3)
    rig.run()
    assert kinds(rig) == [
        [(0, False, 8)],
        [(0, False, 8)],
        [(0, False, 3)],
        [(0, True, 1)],
        [(0, True, 1)],
    ]
    assert [step.chooses for step in rig.worker.steps] == [(), (), (request,)] + [(request,)] * 2
    assert request.output_ids == alone(request.prompt_ids, 3)
    assert (request.finish_reason, sum(request.decode_steps.values())) == ("length", 2)
    rig.assert_nothing_held()


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    rig = Rig()
    rig.add(1, max_tokens=2)
    rig.run()
    assert kinds(rig) == [[(0, False, 1)], [(0, True, 1)]]


def test_decode_steps_are_pure_and_alternate_with_chunks_of_a_late_prompt() -> None:
    rig = Rig()
    rig.add(2, max_tokens=6)
    rig.loop.step()
    rig.add(20, max_tokens=2)
    rig.run()
    steps = kinds(rig)
    assert steps[1:6] == [
        [(0, True, 1)],
        [(1, False, 8)],
        [(0, True, 1)],
        [(1, False, 8)],
        [(0, True, 1)],
    ]
    assert all(len({is_decode for _, is_decode, _ in step}) == 1 for step in steps)


def test_mixed_steps_fill_what_decode_rows_leave() -> None:
    rig = Rig(can_mix=True)
    rig.add(2, max_tokens=6)
    rig.loop.step()
    rig.add(20, max_tokens=2)
    rig.loop.step()
    assert kinds(rig)[1] == [(0, True, 1), (1, False, 7)]
    rig.run()
    assert [request.output_ids for request in rig.requests] == [
        alone(request.prompt_ids, request.params.max_tokens) for request in rig.requests
    ]


def test_several_prompts_share_a_step_first_come_first_served() -> None:
    rig = Rig(slots=2)
    for prompt in (3, 4, 2):
        rig.add(prompt, max_tokens=2)
    rig.loop.step()
    assert kinds(rig) == [[(0, False, 3), (1, False, 4)]]
    assert (rig.loop.scheduler.num_running, rig.loop.scheduler.num_waiting) == (2, 1)


def test_the_youngest_is_preempted_and_loses_nothing() -> None:
    # Three pages of four tokens: both prompts fit, both replies together do not.
    rig = Rig(slots=2, pages=4, context=16)
    old, young = rig.add(4, max_tokens=9), rig.add(4, max_tokens=9)
    rig.run()
    assert old.num_preemptions == 0
    assert young.num_preemptions >= 1
    for request in (old, young):
        assert request.output_ids == alone(request.prompt_ids, 9)
    rig.assert_nothing_held()


def test_a_recomputed_request_does_not_count_as_decode_until_it_has_its_next_token() -> None:
    rig = Rig(slots=2, pages=4, context=16)
    rig.add(4, max_tokens=9)
    young = rig.add(4, max_tokens=9)
    rig.run()
    recomputed = [
        part
        for step in rig.worker.steps
        for share, part in zip(step.shares, step.batch.requests, strict=True)
        if share.request is young and part.start == 0
    ]
    assert len(recomputed) == 1 + young.num_preemptions
    assert not any(part.is_decode for part in recomputed)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(pages=3, context=40)
    with pytest.raises(RequestError, match=r"needs 4 pages of 4 tokens; the cache has 3"):
        rig.add(8, max_tokens=6)
    with pytest.raises(RequestError, match=r"makes 43; max_context_tokens is 40"):
        rig.add(39, max_tokens=4)
    with pytest.raises(RequestError, match="no tokens"):
        rig.add(())
    assert not rig.loop.scheduler.has_work
    # One that fills the cache to the last place is served: its last token is never cached.
    request = rig.add(8, max_tokens=5)
    rig.run()
    assert len(request.output_ids) == 5


def test_a_step_too_small_for_all_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_tokens is 3"):
        Scheduler(empty_caches(4, 4), SchedulerLimits(3, 16))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_abort_in_any_state_frees_everything(steps: int) -> None:
    rig = Rig()
    request = rig.add(12, max_tokens=4)
    for _ in range(steps):
        rig.loop.step()
    rig.loop.abort(0)
    rig.loop.abort(0)
    assert request.finish_reason == "abort"
    rig.assert_nothing_held()
    assert rig.loop.step() == []
    assert rig.loop.collect(0).finish_reason == "abort"


def test_a_broken_step_ends_its_requests_only() -> None:
    rig = Rig(slots=2)
    first, second, third = rig.add(2), rig.add(2), rig.add(2)
    rig.worker.fails_at = {2}
    rig.run()
    assert first.finish_reason == second.finish_reason == "error"
    assert first.error == "RuntimeError: the fake step breaks"
    assert third.output_ids == alone(third.prompt_ids, 5)
    rig.assert_nothing_held()


def test_an_interrupt_frees_its_requests_and_goes_through() -> None:
    rig = Rig()
    rig.add(2)

    def interrupt(step: object) -> None:
        raise KeyboardInterrupt

    rig.worker.execute = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        rig.loop.step()
    rig.assert_nothing_held()


def test_bad_logits_end_one_request_and_no_other() -> None:
    rig = Rig()
    bad, good = rig.add(2), rig.add(3)
    rig.worker.bad_rows = {(bad.number, 2)}
    rig.run()
    assert (bad.finish_reason, bad.error) == ("error", "the fake row is bad")
    assert len(bad.output_ids) == 2
    assert good.output_ids == alone(good.prompt_ids, 5)
    rig.assert_nothing_held()


def test_an_end_token_counts_as_output_and_ends() -> None:
    rig = Rig()
    prompt = (1, 2, 3)
    expected = alone(prompt, 5)
    request = make_request(0, prompt)
    request.end_token_ids = frozenset(expected[2:3])
    rig.loop.add(request, TextStream(NoText()))
    rig.run()
    end = expected.index(expected[2])
    assert request.output_ids == expected[: end + 1]
    assert request.finish_reason == "stop"


def test_states_move_only_along_the_life_cycle() -> None:
    request = make_request(0, 3)
    with pytest.raises(RuntimeError, match="from waiting to decode"):
        request.move("decode")
    request.finish("abort")
    with pytest.raises(RuntimeError, match="from finished to finished"):
        request.finish("stop")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 14), st.integers(1, 8)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("break"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    actions=ACTIONS,
    slots=st.integers(1, 4),
    pages=st.integers(6, 12),
    step_tokens=st.integers(4, 9),
    can_mix=st.booleans(),
)
def test_any_schedule_leaks_nothing_and_changes_no_output(
    actions: list[tuple[str, int, int]], slots: int, pages: int, step_tokens: int, can_mix: bool
) -> None:
    rig = Rig(slots, pages, step_tokens, context=24, can_mix=can_mix)
    for action, first, second in actions:
        if action == "add":
            rig.add(first, second)
        elif action == "step":
            for _ in range(first):
                rig.loop.step()
        elif action == "abort" and rig.requests:
            rig.loop.abort(first % len(rig.requests))
        elif action == "break":
            rig.worker.fails_at.add(len(rig.worker.steps) + 1)
        held = [request for request in rig.requests if request.slot is not None]
        assert rig.caches.slot_pool.used == {request.slot for request in held}
        pages_held = [page for request in held for page in request.pages]
        assert sorted(pages_held) == sorted(rig.caches.page_pool.used)
    rig.worker.fails_at.clear()
    rig.run()
    rig.assert_nothing_held()
    for request in rig.requests:
        expected = alone(request.prompt_ids, request.params.max_tokens)
        assert request.output_ids == expected[: len(request.output_ids)]
        if request.finish_reason not in ("abort", "error"):
            assert request.finish_reason == "length"
            assert request.output_ids == expected


def test_limits_of_sampling_parameters_carry_the_value() -> None:
    for settings_, message in (
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ({"stop": ("",)}, "empty text"),
        ({"stop": "end"}, "must be a tuple"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**settings_)  # type: ignore[arg-type]
