"""One pass of a workload over a server: when each request is sent.

Owns the two shapes of load, sessions, and the client's own lag. Does not know servers' counters or
what passes are compared with.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kdecode.bench.serving.client import Client, ServedRecord
from kdecode.bench.serving.http import now_ns
from kdecode.bench.workloads.types import Request, Workload, WorkloadError, following_messages

_TICK_S = 0.05


@dataclass(frozen=True)
class Load:
    """concurrency: sessions that live at a time (closed loop). rate: sessions a second (open loop).

    Neither: an open loop by the workload's own times, made `speed` times faster.
    """

    concurrency: int | None = None
    rate: float | None = None
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise WorkloadError("Load is by concurrency or by rate, not by both.")
        if self.concurrency is not None and self.concurrency < 1:
            raise WorkloadError(f"The concurrency is {self.concurrency}; it must be 1 or more.")
        for name, value in (("rate", self.rate), ("speed", self.speed)):
            if value is not None and not 0 < value < math.inf:
                raise WorkloadError(f"The {name} is {value:g}; it must be above 0 and finite.")

    @property
    def is_open(self) -> bool:
        return self.concurrency is None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} at a time"
        if self.rate is not None:
            return f"open loop, {self.rate:g} sessions a second (Poisson, seed {self.seed})"
        return f"open loop, the workload's own times, {self.speed:g} times as fast"

    def starts_s(self, sessions: Sequence[Sequence[Request]]) -> list[float]:
        """When each session begins, for an open loop. Raises WorkloadError."""
        if self.rate is not None:
            source, at, times = random.Random(self.seed), 0.0, []
            for _ in sessions:
                times.append(at)
                at += source.expovariate(self.rate)
            return times
        found = []
        for turns in sessions:
            if turns[0].at_s is None:
                raise WorkloadError(
                    f"Request {turns[0].id} has no time to begin; name a concurrency or a rate."
                )
            found.append(turns[0].at_s / self.speed)
        return found


@dataclass(frozen=True)
class PassResult:
    """What a pass gave. lags_s: how late the client's event loop came to a wake-up of its own."""

    records: tuple[ServedRecord, ...]
    planned: int
    begin_ns: int
    end_ns: int
    lags_s: tuple[float, ...]

    @property
    def sent(self) -> int:
        return len(self.records)

    @property
    def completed(self) -> int:
        return sum(record.error is None for record in self.records)


async def run_pass(
    client: Client, workload: Workload, load: Load, salt: str | None = None
) -> PassResult:
    """Plays the whole workload once. salt: of the caches; sessions share what they have inside."""
    sessions = workload.sessions()
    records: list[ServedRecord] = []
    begin_ns = now_ns()

    async def play(turns: Sequence[Request], start_ns: int | None) -> None:
        async for record in _session(client, workload, turns, start_ns, load.speed, salt):
            records.append(record)

    with _lag_meter() as lags:
        if load.concurrency is not None:
            queue = iter(sessions)

            async def worker() -> None:
                # One iterator for all workers: each takes the next session when it is free.
                for turns in queue:
                    await play(turns, None)

            async with asyncio.TaskGroup() as group:
                for _ in range(min(load.concurrency, len(sessions))):
                    group.create_task(worker())
        else:
            starts = load.starts_s(sessions)
            async with asyncio.TaskGroup() as group:
                for turns, start_s in zip(sessions, starts, strict=True):
                    group.create_task(play(turns, begin_ns + round(start_s * 1e9)))
    order = {request.id: place for place, request in enumerate(workload.requests)}
    return PassResult(
        records=tuple(sorted(records, key=lambda record: order[record.request_id])),
        planned=len(workload.requests),
        begin_ns=begin_ns,
        end_ns=now_ns(),
        lags_s=tuple(lags),
    )


async def _session(
    client: Client,
    workload: Workload,
    turns: Sequence[Request],
    start_ns: int | None,
    speed: float,
    salt: str | None,
) -> AsyncIterator[ServedRecord]:
    """Yields the turns' records; a turn that fails ends its session, and the rest is not sent."""
    history: tuple[Mapping[str, Any], ...] | None = None
    before: ServedRecord | None = None
    for place, request in enumerate(turns):
        intended_ns = start_ns
        if place and before is not None and (start_ns is not None or request.delay_s):
            intended_ns = before.end_ns + round(request.delay_s * 1e9 / speed)
        await _sleep_until(intended_ns)
        if workload.reply_mode == "live":
            if before is None or before.reply is None:
                history = request.messages
            else:
                previous = turns[place - 1]
                reply = before.reply.content
                history = following_messages(history or (), previous, request, reply)
        before = await client.send(request, salt=salt, intended_ns=intended_ns, messages=history)
        yield before
        if before.error is not None:
            return


async def _sleep_until(at_ns: int | None) -> None:
    if at_ns is not None and at_ns > now_ns():
        await asyncio.sleep((at_ns - now_ns()) / 1e9)


@contextmanager
def _lag_meter() -> Iterator[list[float]]:
    """Wakes up now and then, and notes how much too late."""
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    handle: list[asyncio.TimerHandle] = []

    def again() -> None:
        due = loop.time() + _TICK_S
        handle[:] = [loop.call_at(due, tick, due)]

    def tick(due: float) -> None:
        lags.append(max(0.0, loop.time() - due))
        again()

    again()
    try:
        yield lags
    finally:
        handle[0].cancel()
