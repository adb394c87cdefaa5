"""Rounds without a model: uneven acceptance, aborts, arrivals and preemption at any moment."""

from __future__ import annotations

import random

import pytest
import torch
from engine_fakes import VOCAB, FakeWorker, empty_caches, make_request, next_token

from kdecode.config import ConfigError
from kdecode.engine.loop import StepLoop, StepResult
from kdecode.engine.request import Request
from kdecode.engine.sampling import BadLogits, Choice
from kdecode.engine.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from kdecode.engine.text import TextStream
from kdecode.speculative.types import Verdict


class NoText:
    """A detokeniser for requests whose text does not matter."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class DraftingWorker(FakeWorker):
    """Accepts a random number of drafts of each request; keeps only the rows that stay."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self.drafts: list[int] = []

    def execute(self, step: ScheduledStep) -> StepResult:
        plain = super().execute(step)
        if not any(share.num_drafts for share in step.shares):
            return plain
        choices: list[Choice | BadLogits] = []
        for share, request in zip(step.shares, step.batch.requests, strict=True):
            assert request.is_decode
            assert len(request.token_ids) == 1
            # The rows of all drafts have their places, whatever becomes of them.
            needed = request.start + 1 + share.num_drafts
            assert len(request.pages) * self.page_tokens >= needed
            self.drafts.append(share.num_drafts)
            accepted = self._draw.randint(0, share.num_drafts)
            history = self.history[request.slot]
            tokens = [next_token(history)]
            for _ in range(accepted):
                history += (tokens[-1],)
                tokens.append(next_token(history))
            self.history[request.slot] = history
            verdict = Verdict(accepted, tokens[-1], share.num_drafts)
            choices.append(Choice(tuple(tokens), torch.zeros(len(tokens), VOCAB), verdict))
        return StepResult(choices, self.path)


class Rig:
    def __init__(self, seed: int, slots: int = 4, pages: int = 14, context: int = 40) -> None:
        self.draw = random.Random(seed)
        self.caches = empty_caches(slots, pages)
        limits = SchedulerLimits(24, context, num_drafts=3)
        self.worker = DraftingWorker(self.draw)
        self.loop = StepLoop(Scheduler(self.caches, limits), self.worker)
        self.requests: list[Request] = []

    def add(self, prompt: int, max_tokens: int) -> Request:
        request = make_request(len(self.requests), prompt, max_tokens)
        self.loop.add(request, TextStream(NoText()))
        self.requests.append(request)
        return request


def alone(prompt_ids: tuple[int, ...], count: int) -> list[int]:
    history = prompt_ids
    for _ in range(count):
        history += (next_token(history),)
    return list(history[len(prompt_ids) :])


def test_requests_come_go_and_are_preempted_between_rounds() -> None:
    assert sum(_random_schedule(seed) for seed in range(40)) > 20


def _random_schedule(seed: int) -> int:
    """Every request has the tokens that it would have alone, as far as it came; preemptions."""
    rig = Rig(seed, pages=10)
    events = 0
    for _ in range(400):
        chance = rig.draw.random()
        if chance < 0.2 and len(rig.requests) < 14:
            rig.add(rig.draw.choice((1, 2, 7, 15)), rig.draw.choice((1, 2, 5, 12, 20)))
        elif chance < 0.25 and rig.requests:
            rig.loop.abort(rig.draw.choice(rig.requests).number)
        events += len(rig.loop.step())
        running = [r for r in rig.requests if r.slot is not None]
        assert rig.caches.page_pool.num_used == sum(len(r.pages) for r in running)
        assert all(r.num_pending >= 1 for r in running)
    while rig.loop.scheduler.has_work:
        events += len(rig.loop.step())
    for request in rig.requests:
        assert request.output_ids == alone(request.prompt_ids, len(request.output_ids))
        if request.finish_reason == "length":
            assert len(request.output_ids) == request.params.max_tokens
        # C4: the first token is the prompt's, the others are of rounds or of plain steps.
        assert request.rounds.emitted <= max(0, len(request.output_ids) - 1)
        assert request.rounds.emitted <= request.rounds.accepted + request.rounds.rounds
    assert events > 0
    assert (rig.caches.page_pool.num_used, rig.caches.slot_pool.num_used) == (0, 0)
    assert max(rig.worker.drafts) == 3
    return rig.loop.scheduler.num_preemptions


def test_emitted_tokens_are_all_but_the_first() -> None:
    """With a reply whose rounds all have drafts, and its end inside of an accepted run."""
    rig = Rig(0, slots=1, pages=10)
    request = rig.add(4, max_tokens=21)
    while rig.loop.scheduler.has_work:
        rig.loop.step()
    plain = sum(request.decode_steps.values()) - request.rounds.rounds
    assert request.rounds.emitted + plain == len(request.output_ids) - 1
    assert plain <= 1


def test_fewer_drafts_near_the_longest_context_and_none_for_the_last_token() -> None:
    rig = Rig(1, slots=1, pages=10, context=20)
    request = rig.add(8, max_tokens=12)
    known = []
    while rig.loop.scheduler.has_work:
        known.append(request.num_tokens)
        rig.loop.step()
    assert request.output_ids == alone(request.prompt_ids, 12)
    for tokens, drafts in zip(known[1:], rig.worker.drafts, strict=False):
        assert tokens + drafts <= 20
        assert drafts == min(3, 20 - tokens)


def test_drafts_take_no_page_from_the_tokens_of_others() -> None:
    """Three requests fill the pages: rounds go on without drafts, and nobody is preempted."""
    rig = Rig(2, slots=3, pages=6)
    for _ in range(3):
        rig.add(5, max_tokens=3)
    while rig.loop.scheduler.has_work:
        rig.loop.step()
    assert [r.output_ids for r in rig.requests] == [alone(r.prompt_ids, 3) for r in rig.requests]
    assert rig.loop.scheduler.num_preemptions == 0


def test_limits_that_cannot_hold_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 16 \(requests: 4, drafts of each: 3\)"):
        Scheduler(empty_caches(4, 4), SchedulerLimits(15, 40, num_drafts=3))
    with pytest.raises(ConfigError, match="can_mix"):
        Scheduler(empty_caches(4, 4), SchedulerLimits(16, 40, can_mix=True, num_drafts=3))
