"""Which requests run in the next step, and with how many tokens.

Owns admission, chunks, preemption and the accounting of slots and pages: every request that runs
has its slot and the pages of the tokens it is about to compute, by construction. Does not know
models, logits or text. Decode before prefill.

Requests are served by rank: the lower priority number first, the older one of equal ones. Nobody
that is not past its prompt is overtaken for ever: after `MAX_OVERTAKEN` admissions of younger
requests it ranks before all that have not waited so long. The first in rank is admitted or all
wait, so that no stream of short prompts keeps a long one out.

When a decode step finds no free page, the running request that is last in rank gives all of its
back and waits to be computed again. The first in rank is therefore never held up, and each request
alone fits (`add` refuses the others), so the engine always advances.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.budget import pages_for
from kdecode.cache.caches import Caches
from kdecode.cache.prefix import Hit, PrefixCache
from kdecode.config import ConfigError
from kdecode.engine.request import FinishReason, Request, RequestError
from kdecode.engine.sampling import BadLogits, Choice
from kdecode.prefill.chunks import room_to_boundary, share_budget

# Admissions of younger requests that one may have to see before its own.
MAX_OVERTAKEN = 64


class PagePool(Protocol):
    """Where pages come from: the caches' pool, or what shares them between requests."""

    @property
    def num_free(self) -> int: ...
    def allocate(self, count: int = 1) -> tuple[int, ...]: ...
    def free(self, places: Sequence[int], /) -> None: ...


@dataclass(frozen=True)
class SchedulerLimits:
    """max_step_tokens: tokens of one step. max_context_tokens: prompt and reply of one request.

    can_mix: prefill chunks may share a step with decode rows. Off, the two kinds alternate, so that
    decode steps are pure and a long prompt delays each of them by one chunk at most. num_drafts: of
    each request in a decode step; only pure ones have any. state_interval_tokens: prompts are cut
    on its multiples, with a prefix cache or without one.
    """

    max_step_tokens: int
    max_context_tokens: int
    can_mix: bool = False
    num_drafts: int = 0
    state_interval_tokens: int | None = None


@dataclass(frozen=True)
class Share:
    """A request's part of a step. has_choice: the step computes its last known token.

    num_drafts: tokens behind its own that the step may compute on trial; its pages hold them.
    """

    request: Request
    num_tokens: int
    has_choice: bool
    num_drafts: int = 0


@dataclass(frozen=True)
class ScheduledStep:
    """What the worker runs. Its batch is a copy: later changes of requests do not reach it."""

    shares: tuple[Share, ...]
    batch: StepBatch

    @property
    def chooses(self) -> tuple[Request, ...]:
        """The requests that get a token from this step, in row order."""
        return tuple(share.request for share in self.shares if share.has_choice)

    @property
    def choice_rows(self) -> tuple[int, ...]:
        """The rows of `chooses` among the step's logits: the last one of each."""
        rows, first = [], 0
        for share, request in zip(self.shares, self.batch.requests, strict=True):
            first += request.num_logits
            if share.has_choice:
                rows.append(first - 1)
        return tuple(rows)

    @property
    def has_decode(self) -> bool:
        return any(request.is_decode for request in self.batch.requests)


def check_step_tokens(max_step_tokens: int, num_slots: int, num_drafts: int) -> None:
    """Raises ConfigError unless a decode step of all requests fits into a step."""
    needed = num_slots * (1 + num_drafts)
    if max_step_tokens < needed:
        raise ConfigError(
            f"max_step_tokens is {max_step_tokens}; a decode step of all requests at once needs "
            f"{needed} (requests: {num_slots}, drafts of each: {num_drafts})."
        )


class Scheduler:
    """Requests between arrival and end. `schedule` and then `commit` (or `fail`) make one step.

    prefix: what finds prefixes of prompts in the caches; None to compute every prompt whole.
    """

    def __init__(
        self, caches: Caches, limits: SchedulerLimits, prefix: PrefixCache | None = None
    ) -> None:
        check_step_tokens(limits.max_step_tokens, caches.num_slots, limits.num_drafts)
        if limits.can_mix and limits.num_drafts:
            raise ConfigError("can_mix is set; only pure decode steps have drafts.")
        self._caches = caches
        self._limits = limits
        self._prefix = prefix
        self._pages: PagePool = caches.page_pool if prefix is None else prefix.pages
        # By rank.
        self._waiting: list[Request] = []
        # In order of admission, which is the order of a step's rows.
        self._running: list[Request] = []
        self._was_decode = False
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Takes a request in. Raises RequestError if it could never run."""
        prompt, reply = len(request.prompt_ids), request.params.max_tokens
        if prompt == 0:
            raise RequestError("The prompt has no tokens; at least 1 is needed.")
        if prompt + reply > self._limits.max_context_tokens:
            raise RequestError(
                f"A prompt of {prompt:,} tokens with max_tokens {reply:,} makes "
                f"{prompt + reply:,}; max_context_tokens is {self._limits.max_context_tokens:,}."
            )
        needed = self._pages_for(request.max_total_tokens)
        if needed > self._caches.num_pages:
            raise RequestError(
                f"A prompt of {prompt:,} tokens with max_tokens {reply:,} needs {needed:,} pages "
                f"of {self._caches.page_tokens} tokens; the cache has {self._caches.num_pages:,}."
            )
        insort(self._waiting, request, key=_rank)

    def schedule(self) -> ScheduledStep | None:
        """The next step; None when there is nothing to do."""
        decoding = [request for request in self._running if request.state == "decode"]
        is_prefill_turn = self._was_decode or not decoding
        shares: list[Share] = []
        if self._limits.can_mix or not is_prefill_turn:
            shares = self._decode_shares()
        if self._limits.can_mix or is_prefill_turn:
            self._admit()
            shares += self._prefill_shares(self._limits.max_step_tokens - len(shares))
        if not shares:
            # A prefill turn without a prompt to prefill.
            shares = self._decode_shares()
        self._was_decode = any(share.request.state == "decode" for share in shares)
        if not shares:
            return None
        return ScheduledStep(tuple(shares), StepBatch(tuple(map(_step_request, shares))))

    def commit(self, step: ScheduledStep, choices: Sequence[Choice | BadLogits]) -> None:
        """Records what the requests of a step that ran have in the caches now.

        choices: of `step.chooses`, in its order; `take` then records their tokens.
        """
        chosen = iter(choices)
        for share in step.shares:
            request = share.request
            choice = next(chosen) if share.has_choice else None
            if request.is_finished:
                continue
            if isinstance(choice, BadLogits):
                request.is_refusal = choice.is_refusal
                self.finish(request, "error", choice.message)
            elif choice is not None and choice.verdict is not None:
                request.num_cached += choice.verdict.committed_rows
            else:
                begin = request.num_cached
                request.num_cached += share.num_tokens
                if self._prefix is not None and request.state == "prefill":
                    assert request.slot is not None
                    span = (begin, request.num_cached)
                    self._prefix.publish(request.page_names, request.pages, span, request.slot)

    def fail(self, step: ScheduledStep, error: str) -> None:
        """Ends every request of a step that broke: their caches are in an unknown state."""
        for share in step.shares:
            if not share.request.is_finished:
                self.finish(share.request, "error", error)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request wherever it is and frees all that it holds."""
        if request.state == "waiting":
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        request.finish(reason, error)

    def take(self, request: Request, token: int) -> None:
        """Gives a request its next token, which may end it."""
        if request.state == "prefill":
            request.move("decode")
        request.take(token)
        count = len(request.output_ids)
        if token in request.end_token_ids and count >= request.params.min_tokens:
            self.finish(request, "stop")
        elif request.is_complete:
            # Also before min_tokens: nothing can follow.
            self.finish(request, "stop")
        elif count == request.params.max_tokens:
            self.finish(request, "length")

    def _admit(self) -> None:
        """Moves waiting requests in by rank, while a slot and pages for all they know exist.

        A page for each running request that still grows stays free: a newcomer that takes the last
        one would be the first to be preempted.
        """
        while self._waiting and self._caches.slot_pool.num_free:
            request = self._waiting[0]
            growing = sum(
                len(other.pages) < self._pages_for(other.max_total_tokens)
                for other in self._running
            )
            hit = self._find_prefix(request)
            needed = self._pages_for(request.num_tokens) - len(hit.pages)
            free = self._pages.num_free
            if self._prefix is not None:
                free -= self._prefix.pages.count_idle(hit.pages)
            if needed + growing > free:
                return
            del self._waiting[0]
            self._start(request, hit, needed)
            self._overtake(request)

    def _find_prefix(self, request: Request) -> Hit:
        """What of a request is in the caches. A prompt whose logprobs are told is computed."""
        known = request.num_tokens
        if self._prefix is None:
            return Hit(0, (), 0)
        if len(request.page_names) < known // self._caches.page_tokens:
            ids = request.pending_ids(known)
            self._prefix.name_pages(request.page_names, ids, request.cache_salt)
        if request.params.prompt_logprobs is not None:
            return Hit(0, (), 0)
        return self._prefix.find(request.page_names, known)

    def _start(self, request: Request, hit: Hit, new_pages: int) -> None:
        request.move("prefill")
        if self._prefix is not None and hit.pages:
            # Before pages are allocated, which may take idle ones.
            self._prefix.pages.hold(hit.pages)
        request.pages = [*hit.pages, *self._pages.allocate(new_pages)]
        request.slot = self._caches.allocate_slot()
        request.num_cached = request.num_resumed = hit.num_tokens
        if self._prefix is not None:
            if hit.num_tokens:
                self._prefix.load_state(request.page_names, hit, request.slot)
            if request.num_preemptions == 0 and request.params.prompt_logprobs is None:
                request.num_reused = hit.num_tokens
                self._prefix.count(hit, request.num_tokens)
        self._running.append(request)

    def _overtake(self, newcomer: Request) -> None:
        """Counts an admission for those older ones that are not past their prompts."""
        is_late = False
        late = [request for request in self._running if request.state == "prefill"]
        for request in (*self._waiting, *late):
            if request.number < newcomer.number:
                request.num_overtaken += 1
                is_late = is_late or request.num_overtaken == MAX_OVERTAKEN
        if is_late:
            self._waiting.sort(key=_rank)

    def _decode_shares(self) -> list[Share]:
        # By rank, so that whoever has to go has not had its turn.
        for request in sorted(self._running, key=_rank):
            if request.state == "decode":
                self._grow(request)
        decoding = [request for request in self._running if request.state == "decode"]
        shares = [Share(request, 1, has_choice=True) for request in decoding]
        # Once every request has the page of its own token: drafts never take one from those.
        return [replace(share, num_drafts=self._room_for_drafts(share.request)) for share in shares]

    def _room_for_drafts(self, request: Request) -> int:
        """How many drafts a request may have; takes free pages for them, and nobody's else.

        The last token needs none, as it is the target's own. A reply that is followed has its own
        next tokens for drafts.
        """
        known, tokens = request.num_tokens, self._caches.page_tokens
        wanted = min(self._limits.num_drafts, self._limits.max_context_tokens - known)
        left = request.params.max_tokens - len(request.output_ids)
        if left == 1 or request.forced_ids is not None:
            wanted = min(wanted, left - 1)
        missing = self._pages_for(known + wanted) - len(request.pages)
        if missing > 0:
            taken = min(missing, self._pages.num_free)
            request.pages += self._pages.allocate(taken)
        return max(0, min(wanted, len(request.pages) * tokens - known))

    def _prefill_shares(self, budget_tokens: int) -> list[Share]:
        requests = [request for request in self._running if request.state == "prefill"]
        requests.sort(key=_rank)
        interval, rooms = self._limits.state_interval_tokens, None
        if interval is not None:
            rooms = [room_to_boundary(request.num_cached, interval) for request in requests]
        pending = [request.num_pending for request in requests]
        counts = share_budget(pending, budget_tokens, rooms)
        return [
            Share(request, count, has_choice=count == request.num_pending)
            for request, count in zip(requests, counts, strict=True)
            if count
        ]

    def _grow(self, request: Request) -> None:
        """Makes room for one more token, by preemption if need be, perhaps of `request` itself."""
        if len(request.pages) * self._caches.page_tokens > request.num_cached:
            return
        while not self._pages.num_free:
            victim = max(self._running, key=_rank)
            self._preempt(victim)
            if victim is request:
                return
        request.pages += self._pages.allocate()

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.move("waiting")
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_rank)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._caches.free_slot(request.slot)
        self._pages.free(request.pages)
        request.slot, request.pages, request.num_cached = None, [], 0

    def _pages_for(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self._caches.page_tokens)


def _rank(request: Request) -> tuple[bool, int, int]:
    """What is served first, and preempted last, is smallest."""
    return request.num_overtaken < MAX_OVERTAKEN, request.priority, request.number


def _step_request(share: Share) -> StepRequest:
    request = share.request
    assert request.slot is not None
    tells_prompt = request.state == "prefill" and request.params.prompt_logprobs is not None
    return StepRequest(
        token_ids=request.pending_ids(share.num_tokens),
        start=request.num_cached,
        slot=request.slot,
        pages=tuple(request.pages),
        is_decode=request.state == "decode",
        needs_logits=share.has_choice or tells_prompt,
        all_logits=tells_prompt,
        is_resumed=request.state == "prefill" and 0 < request.num_cached == request.num_resumed,
    )
