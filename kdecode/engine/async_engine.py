"""An engine that serves many callers at once: one thread steps it, asyncio tasks talk to it.

Owns the thread, the orders that cross into it (submit, abort, stop) and the queues that come back.
Does not know HTTP, chat or text formats; what a step does is `StepLoop`'s business. While an
`AsyncEngine` runs, nothing else may use its `LLM` for generation.

A step that fails ends the requests it served; their callers see an event with finish_reason "error"
and an `Output` with the message. Where a rank of the model is lost, every step fails: all requests
end like that, and the engine with them. An error outside a step (a fault of the engine itself) ends
all of them with `EngineStoppedError`, and the engine takes no more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kdecode.engine.engine import LLM
from kdecode.engine.loop import Event
from kdecode.engine.request import Output, SamplingParams
from kdecode.parallel.ranks import RankError

log = logging.getLogger(__name__)

# Between two looks at the other ranks while there is nothing to do.
_LOOK_S = 1.0


class EngineStoppedError(RuntimeError):
    """The engine runs no more; the message says why."""


@dataclass(frozen=True)
class Job:
    """One request of a group: a prompt's ids and how to continue it.

    priority, cache_salt: see `LLM.add_request`.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class _Message:
    """What the engine's thread tells a group: of one job an event, or of all that it is over."""

    index: int
    event: Event | None
    output: Output | None = None
    error: str | None = None


class RequestGroup:
    """Requests that were handed in together, and their events in the order they happened.

    Belongs to the asyncio loop that submitted it. `outputs[i]` is there once job i has ended.
    """

    def __init__(self, size: int, abort: Callable[[RequestGroup, int], None]) -> None:
        self.outputs: list[Output | None] = [None] * size
        self._open = set(range(size))
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Message] = asyncio.Queue()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(job, event) until every job has ended. Raises EngineStoppedError."""
        while self._open:
            message = await self._queue.get()
            if message.event is None:
                self._open.clear()
                raise EngineStoppedError(message.error)
            if message.index not in self._open:
                continue
            if message.output is not None:
                self.outputs[message.index] = message.output
                self._open.discard(message.index)
            yield message.index, message.event

    def abort(self, index: int) -> None:
        """Ends one job now; no event of it follows."""
        if index in self._open:
            self._open.discard(index)
            self._abort(self, index)

    def close(self) -> None:
        """Ends whatever is still open. Does not wait, so that it may be called when cancelled."""
        for index in list(self._open):
            self.abort(index)

    def deliver(self, message: _Message) -> None:
        """Called by the engine inside the group's asyncio loop."""
        self._queue.put_nowait(message)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


class AsyncEngine:
    """Runs an `LLM` in a thread of its own. Methods may be called from any asyncio loop.

    on_death is called from the engine's thread when a fault of the engine ends it.
    """

    def __init__(self, llm: LLM, on_death: Callable[[], None] | None = None) -> None:
        self.llm = llm
        self._on_death = on_death
        self._wake = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._end: str | None = None
        self._has_died = False
        # Owned by the engine's thread: who follows a request, and the numbers of a group's jobs.
        self._followers: dict[int, tuple[RequestGroup, int]] = {}
        self._numbers: dict[tuple[RequestGroup, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="kdecode-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._end is None and not self._is_stopping

    @property
    def has_died(self) -> bool:
        """A fault of the engine ended it."""
        return self._has_died

    async def submit(self, jobs: Sequence[Job]) -> RequestGroup:
        """Hands requests in, all or none. Raises RequestError, EngineStoppedError."""
        start_ns = time.perf_counter_ns()
        group = RequestGroup(len(jobs), self._abort)
        accepted: asyncio.Future[None] = group.loop.create_future()
        self._order(partial(self._accept, group, jobs, start_ns, accepted))
        try:
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            # The order may run after this; the one that ends it is behind it in the same queue.
            group.close()
            raise
        return group

    async def stop(self) -> None:
        """Ends every open request and the thread; callers see EngineStoppedError."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            if self._end is not None or self._is_stopping:
                raise EngineStoppedError(self._end or "The engine is stopping.")
            self._orders.append(order)
            self._wake.notify()

    def _abort(self, group: RequestGroup, index: int) -> None:
        try:
            self._order(partial(self._forget, group, index))
        except EngineStoppedError:
            # The thread ends every request on its way out.
            log.debug("a request was aborted after the engine had stopped")

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._tell(self.llm.loop.step())
                self._require_ranks()
            self._finish("The engine was stopped.")
        except BaseException as error:
            # A rank that is lost is no fault of this program's, and its message says all.
            log.error("the engine broke: %s", error, exc_info=not isinstance(error, RankError))
            self._has_died = True
            self._finish(f"The engine broke: {type(error).__name__}: {error}")
            if self._on_death is not None:
                self._on_death()

    def _require_ranks(self) -> None:
        """Raises RankError where a rank is lost, once every request has been told by its step."""
        failure = self.llm.rank_failure
        if failure is None:
            return
        while self.llm.loop.scheduler.has_work:
            self._tell(self.llm.loop.step())
        raise failure

    def _take_orders(self) -> bool:
        """Carries out what was ordered; waits while there is nothing to do. False to stop."""
        has_ranks = self.llm.engine_config.tensor_parallel_size > 1
        with self._wake:
            while not (self._orders or self._is_stopping or self.llm.loop.scheduler.has_work):
                self._wake.wait(_LOOK_S if has_ranks else None)
                if has_ranks:
                    self.llm.check_ranks()
            orders = list(self._orders)
            self._orders.clear()
            is_stopping = self._is_stopping
        for order in orders:
            order()
        return not is_stopping

    def _accept(
        self,
        group: RequestGroup,
        jobs: Sequence[Job],
        start_ns: int,
        accepted: asyncio.Future[None],
    ) -> None:
        error: Exception | None = None
        try:
            for index, job in enumerate(jobs):
                number = self.llm.add_request(
                    job.prompt_ids,
                    job.params,
                    start_ns=start_ns,
                    priority=job.priority,
                    cache_salt=job.cache_salt,
                )
                self._followers[number] = (group, index)
                self._numbers[group, index] = number
        except Exception as raised:
            # RequestError is the caller's; anything else is of this one request, too.
            error = raised
            for index in range(len(jobs)):
                self._forget(group, index)
        self._call(group.loop, partial(_resolve, accepted, error))

    def _forget(self, group: RequestGroup, index: int) -> None:
        number = self._numbers.pop((group, index), None)
        if number is not None:
            del self._followers[number]
            self.llm.loop.drop(number)

    def _tell(self, events: Sequence[Event]) -> None:
        """Hands a step's events over: one call for each asyncio loop, however many requests."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[RequestGroup, _Message]]] = {}
        for event in events:
            if event.number not in self._followers:
                continue
            group, index = self._followers[event.number]
            output = None
            if event.finish_reason is not None:
                output = self.llm.loop.collect(event.number)
                del self._followers[event.number], self._numbers[group, index]
            message = _Message(index, event, output)
            batches.setdefault(group.loop, []).append((group, message))
        for loop, batch in batches.items():
            self._call(loop, partial(_deliver, batch))

    def _finish(self, reason: str) -> None:
        with self._wake:
            self._end = reason
            # Those who still wait to be accepted get their answer from their order.
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            order()
        groups = {group for group, _ in self._followers.values()}
        for group, index in list(self._numbers):
            self._forget(group, index)
        over = _Message(-1, None, error=reason)
        for group in groups:
            self._call(group.loop, partial(group.deliver, over))

    def _call(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # That loop has closed, and with it everyone who could have listened.
            log.debug("events of a closed loop are dropped")


def _deliver(batch: Sequence[tuple[RequestGroup, _Message]]) -> None:
    for group, message in batch:
        group.deliver(message)


def _resolve(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
