"""Caches without tensors and a worker without a model, for tests of scheduling."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch

from kdecode.cache.caches import Caches
from kdecode.cache.pool import IndexPool
from kdecode.engine.loop import StepResult
from kdecode.engine.request import Request, SamplingParams, Timing
from kdecode.engine.sampling import BadLogits, Choice
from kdecode.engine.scheduler import ScheduledStep

VOCAB = 50


def empty_caches(num_slots: int, num_pages: int, page_tokens: int = 4) -> Caches:
    return Caches(
        page_tokens=page_tokens,
        cache_dtype="bf16",
        conv={},
        recurrent={},
        pages={},
        scales={},
        slot_pool=IndexPool(num_slots, "KDA slot"),
        page_pool=IndexPool(num_pages, "MLA page"),
    )


def make_request(number: int, prompt: int | tuple[int, ...], max_tokens: int = 5) -> Request:
    ids = tuple((number + i) % VOCAB for i in range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens)
    return Request(number, ids, params, frozenset(), seed=0, timing=Timing(start_ns=0))


def next_token(history: tuple[int, ...]) -> int:
    """The fake model: the next token is a function of all tokens before it."""
    return hashlib.sha256(repr(history).encode()).digest()[0] % VOCAB


class FakeWorker:
    """Keeps what a real cache would: the tokens behind each slot. Checks every step against it.

    A slot's history must be extended exactly where it ended, from nothing when the request is new,
    and on pages that no other request of the step has.
    """

    def __init__(self, page_tokens: int = 4) -> None:
        self.page_tokens = page_tokens
        self.history: dict[int, tuple[int, ...]] = {}
        self.steps: list[ScheduledStep] = []
        self.fails_at: set[int] = set()
        self.bad_rows: set[tuple[int, int]] = set()
        self.path = ("standard", "fake")

    def execute(self, step: ScheduledStep) -> StepResult:
        self.steps.append(step)
        if len(self.steps) in self.fails_at:
            raise RuntimeError("the fake step breaks")
        pages = Counter(page for request in step.batch.requests for page in request.pages)
        assert not pages or max(pages.values()) == 1, "two requests share a page"
        choices: list[Choice | BadLogits] = []
        for share, request in zip(step.shares, step.batch.requests, strict=True):
            known = () if request.start == 0 else self.history[request.slot]
            assert len(known) == request.start
            assert len(request.pages) * self.page_tokens >= request.start + len(request.token_ids)
            self.history[request.slot] = known + request.token_ids
            if share.has_choice:
                key = (share.request.number, len(share.request.output_ids))
                is_bad = key in self.bad_rows
                token = next_token(self.history[request.slot])
                choice = Choice((token,), torch.zeros(1, VOCAB))
                choices.append(BadLogits("the fake row is bad") if is_bad else choice)
        return StepResult(choices, self.path)
