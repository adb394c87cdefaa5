"""CUDA streams without a GPU: what is launched waits in a list until it is run, in any order that
its streams and events allow.

A device may take launches of two streams in many orders, of which a CPU would show one. Here a test
picks: those beside the plan's stream as early as they may run, or as late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch

from kdecode.decode.plan import DecodePlan
from kdecode.decode.streams import SideStreams

Order = Literal["plan", "sides early", "sides late"]


@dataclass(eq=False)
class Stream:
    """before: the launches that whatever is launched here next comes after. is_recorded: whether a
    recording has this stream, as it has every one that has waited for a stream of it."""

    before: set[int] = field(default_factory=set)
    is_recorded: bool = False

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before
        self.is_recorded |= other.is_recorded


@dataclass(frozen=True)
class Launched:
    run: Callable[[], None]
    is_main: bool
    before: frozenset[int]


class Recording:
    """What was launched while it was on, by the stream that was current then."""

    def __init__(self, main: Stream) -> None:
        self.main, self.launched = main, list[Launched]()

    def add(self, run: Callable[[], None], stream: Stream) -> None:
        assert stream.is_recorded, "a stream was not forked from the one that is recorded"
        self.launched.append(Launched(run, stream is self.main, frozenset(stream.before)))
        stream.before.add(len(self.launched) - 1)

    def order(self, order: Order) -> list[int]:
        """All launches, none before one that it comes after. It is found from its end."""
        found, left = list[int](), list(range(len(self.launched)))
        while left:
            awaited = set[int]().union(*(self.launched[index].before for index in left))
            free = [index for index in left if index not in awaited]
            found.insert(0, max(free, key=lambda index: (self._is_late(index, order), index)))
            left.remove(found[0])
        return found

    def replay(self, order: Order = "plan") -> None:
        for index in self.order(order):
            self.launched[index].run()

    def _is_late(self, index: int, order: Order) -> bool:
        is_main = self.launched[index].is_main
        return order != "plan" and (is_main if order == "sides early" else not is_main)


class Device:
    """torch's streams, once `install` has put them there."""

    def __init__(self) -> None:
        self.current = Stream()
        self.recording: Recording | None = None
        self._streams = list[Stream]()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def launch(self, run: Callable[[], None]) -> None:
        if self.recording is None:
            run()
        else:
            self.recording.add(run, self.current)

    def record(self, run: Callable[[], None]) -> Recording:
        """What ``run`` launches from the current stream on; like a graph, it has to be joined."""
        for stream in self._streams:
            stream.before, stream.is_recorded = set(), False
        made = self.recording = Recording(Stream(is_recorded=True))
        try:
            with self.on(made.main):
                run()
        finally:
            self.recording = None
        assert made.main.before == set(range(len(made.launched))), "a stream was not joined"
        return made


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Stream", device.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    return device


def on_device(plan: DecodePlan, device: Device) -> DecodePlan:
    """The plan with steps that are launched there."""

    def launched(run: Callable[[], None]) -> Callable[[], None]:
        return lambda: device.launch(run)

    steps = tuple(replace(step, run=launched(step.run)) for step in plan.steps)
    return replace(plan, steps=steps)


@dataclass
class Pool:
    """`GraphPool` on such a device. order: of the launches of a replay."""

    device: Device
    order: Order = "plan"
    sides: SideStreams = field(default_factory=SideStreams)
    recorded: list[Recording] = field(default_factory=list)

    def warm_up(self, run: Callable[[], None]) -> None:
        """There is nothing to compile or to load."""

    def record(self, run: Callable[[], None]) -> Any:
        self.recorded.append(self.device.record(run))
        return _Graph(self.recorded[-1], self)


@dataclass(frozen=True)
class _Graph:
    recording: Recording
    pool: Pool

    def replay(self) -> None:
        self.recording.replay(self.pool.order)
