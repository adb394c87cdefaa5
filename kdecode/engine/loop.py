"""The step loop: schedule, execute, commit, tell.

Owns the order of these four, the clock and each request's text. Does not know models: a worker is
anything that executes a scheduled step. A step that raises ends the requests it served, and no
others; what they held is free again before the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kdecode.engine.request import FinishReason, Output, Request, TokenLogprobs
from kdecode.engine.sampling import BadLogits, Choice, token_logprobs
from kdecode.engine.scheduler import ScheduledStep, Scheduler
from kdecode.engine.text import TextStream
from kdecode.speculative.stats import RoundStats

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What a worker found. choices: one for each of `step.chooses`.

    path: what served the step, and why it was not the specialised path. prompt_logprobs: what
    became known of prompts' tokens.
    """

    choices: Sequence[Choice | BadLogits]
    path: tuple[str, str]
    prompt_logprobs: Sequence[tuple[Request, Sequence[TokenLogprobs]]] = ()


class StepWorker(Protocol):
    def execute(self, step: ScheduledStep) -> StepResult: ...


@dataclass(frozen=True)
class Event:
    """Progress of one request. token_id None: it ended without a new token (abort, error).

    text: what can be shown now; empty while a character or a stop string is undecided. logits
    [vocab]: what the token was chosen from, for requests that follow a given reply. logprobs: of
    the token, where they were asked for. time_ns: when the token was known, by the loop's clock.
    first_step_ns: when the first step began that computed any of the request. prompt_logprobs: of
    the prompt, with the first token, where they were asked for. is_end_token: the token ended the
    request and is no part of its text.
    """

    number: int
    token_id: int | None
    text: str
    logits: Tensor | None
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    time_ns: int = 0
    first_step_ns: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    is_end_token: bool = False
    # Of the prompt, taken over from the caches.
    cached_tokens: int = 0


@dataclass(frozen=True)
class StepRecord:
    """A step that ran, for whoever watches the loop. path: as in StepResult."""

    num_tokens: int
    has_decode: bool
    path: tuple[str, str]
    duration_ns: int


class StepLoop:
    """Runs requests step by step; single-threaded, and every step is complete when it returns."""

    def __init__(
        self, scheduler: Scheduler, worker: StepWorker, clock: Callable[[], int] | None = None
    ) -> None:
        self.scheduler = scheduler
        self._worker = worker
        self._clock = clock or time.perf_counter_ns
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, TextStream] = {}
        self._untold: list[Event] = []
        # Greedy requests and those that sample accept at rates of their own.
        self.rounds = {"greedy": RoundStats(), "sampled": RoundStats()}
        # Told of every step that ran, inside `step`.
        self.watcher: Callable[[StepRecord], None] | None = None

    def add(self, request: Request, text: TextStream) -> None:
        """Takes a request in. Raises RequestError if it could never run."""
        self.scheduler.add(request)
        self._requests[request.number] = request
        self._texts[request.number] = text

    def abort(self, number: int) -> None:
        """Ends a request, wherever it is; nothing happens when it has ended already."""
        request = self._requests[number]
        if not request.is_finished:
            self.scheduler.finish(request, "abort")
            self._texts[number].close()

    def stop(self, number: int) -> None:
        """Ends a request in whose text its caller found a stop string, with its latest token."""
        request = self._requests[number]
        if not request.is_finished:
            self.scheduler.finish(request, "stop")
            self._texts[number].close()
        elif request.finish_reason == "length":
            request.finish_reason = "stop"

    def collect(self, number: int) -> Output:
        """The output of a finished request, which the loop then forgets."""
        request = self._requests[number]
        if request.finish_reason is None:
            raise RuntimeError(f"request {number} is in {request.state}; it has no output yet.")
        del self._requests[number]
        return Output(
            prompt_ids=request.prompt_ids,
            token_ids=tuple(request.output_ids),
            text=self._texts.pop(number).text,
            finish_reason=request.finish_reason,
            timing=request.timing,
            decode_steps=dict(request.decode_steps),
            num_preemptions=request.num_preemptions,
            error=request.error,
            is_refusal=request.is_refusal,
            logprobs=tuple(request.logprobs),
            prompt_logprobs=tuple(request.prompt_logprobs),
            rounds=request.rounds,
            cached_tokens=request.num_reused,
        )

    def drop(self, number: int) -> None:
        """Aborts a request if it runs, and forgets it if that has not happened yet."""
        if number in self._requests:
            self.abort(number)
            del self._requests[number], self._texts[number]

    def step(self) -> list[Event]:
        """One step, and what it meant to each request that got a token or ended.

        No events: a chunk without a choice ran, or nothing is left (`scheduler.has_work`).
        """
        if self._untold:
            events, self._untold = self._untold, []
            return events
        step = self.scheduler.schedule()
        if step is None:
            return []
        begin = self._clock()
        for share in step.shares:
            if share.request.timing.first_step_ns is None:
                share.request.timing.first_step_ns = begin
        try:
            result = self._worker.execute(step)
        except BaseException as error:
            self.scheduler.fail(step, f"{type(error).__name__}: {error}")
            events = [self._event(share.request, None, None) for share in step.shares]
            if not isinstance(error, Exception):
                # An interrupt reaches its own caller; the others learn of the end at the next step.
                self._untold = events
                raise
            log.exception("a step of %d requests broke", len(step.shares))
            return events
        end = self._clock()
        for share, scheduled in zip(step.shares, step.batch.requests, strict=True):
            if scheduled.is_decode:
                share.request.decode_steps[result.path] += 1
            else:
                share.request.timing.prefill_ns += end - begin
        for request, told in result.prompt_logprobs:
            request.prompt_logprobs += told
        self.scheduler.commit(step, result.choices)
        if self.watcher is not None:
            num_tokens = sum(share.num_tokens for share in step.shares) + _num_drafts(result)
            self.watcher(StepRecord(num_tokens, step.has_decode, result.path, end - begin))
        return self._tell(step, result, end)

    def _tell(self, step: ScheduledStep, result: StepResult, end_ns: int) -> list[Event]:
        """The events of a step that was committed."""
        events = []
        for request, choice in zip(step.chooses, result.choices, strict=True):
            if isinstance(choice, BadLogits):
                events.append(self._event(request, None, None))
            else:
                events += self._take(request, choice, end_ns)
        return events

    def _take(self, request: Request, choice: Choice, end_ns: int) -> list[Event]:
        """Gives a request its tokens; those behind the one that ends it never happened."""
        events: list[Event] = []
        timing, num_top = request.timing, request.params.logprobs
        is_followed = request.forced_ids is not None
        for token, logits in zip(choice.tokens, choice.logits, strict=True):
            self.scheduler.take(request, token)
            timing.token_ns.append(end_ns)
            if timing.prefill_end_ns is None:
                timing.prefill_end_ns = end_ns
            if num_top is not None:
                request.logprobs.append(token_logprobs(logits, token, num_top))
            events.append(self._event(request, token, logits if is_followed else None))
            if request.is_finished:
                break
        # Drafts of a reply that is followed say nothing about a draft model.
        if choice.verdict is not None and not is_followed:
            kind = "greedy" if request.params.is_greedy else "sampled"
            for stats in (request.rounds, self.rounds[kind]):
                stats.record(choice.verdict, len(events))
        return events

    def _event(self, request: Request, token: int | None, logits: Tensor | None) -> Event:
        """Moves the request's text on, and ends the request at a stop string."""
        text = self._texts[request.number]
        shown = ""
        is_end = request.finish_reason == "stop" and token in request.end_token_ids
        if token is not None and not is_end:
            can_stop = len(request.output_ids) >= request.params.min_tokens
            shown = text.push(token, can_stop=can_stop)
        if text.is_stopped and not request.is_finished:
            self.scheduler.finish(request, "stop")
        if request.is_finished:
            shown += text.close()
        if text.is_stopped and request.finish_reason == "length":
            request.finish_reason = "stop"
        has_logprobs = token is not None and request.params.logprobs is not None
        tells_prompt = len(request.output_ids) == 1 and request.params.prompt_logprobs is not None
        return Event(
            number=request.number,
            token_id=token,
            text=shown,
            logits=logits,
            finish_reason=request.finish_reason,
            logprobs=request.logprobs[-1] if has_logprobs else None,
            time_ns=request.timing.token_ns[-1] if token is not None else self._clock(),
            first_step_ns=request.timing.first_step_ns,
            prompt_logprobs=tuple(request.prompt_logprobs) if tells_prompt else None,
            is_end_token=is_end,
            cached_tokens=request.num_reused,
        )


def _num_drafts(result: StepResult) -> int:
    choices = (choice for choice in result.choices if isinstance(choice, Choice))
    return sum(choice.verdict.num_drafts for choice in choices if choice.verdict is not None)
