"""Steps of a plan that run beside others: on which stream each is, and what it waits for.

A step begins when all is over that its own stream was given before it, and all that the streams in
`Step.waits_for` were given before it, in the plan's order. That order is always right: a plan that
is run step by step has one stream. Owns whether the waiting is enough (`find_race`) and the forks
and joins, by events (`SideStreams`). Does not know ops, nor what a stream is for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

# The stream that a plan is launched on; every other one is beside it.
MAIN = "main"


class Streamed(Protocol):
    """What of a `plan.Step` counts here."""

    @property
    def op(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...
    @property
    def stream(self) -> str: ...
    @property
    def waits_for(self) -> tuple[str, ...]: ...
    @property
    def run(self) -> Any: ...


def stream_text(stream: str, waits_for: Collection[str]) -> str:
    """As plans are printed: "main", "main after shared"."""
    return f"{stream} after {' and '.join(waits_for)}" if waits_for else stream


def find_race(steps: Sequence[Streamed]) -> str | None:
    """The first step that may touch a buffer while another stream does, one of them writing it.

    None where every such pair is ordered: by their streams, or by what a step waits for.
    """
    # Of each stream: the last step of every other one that is over before its own next one begins.
    over: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}
    # Of each buffer: the last step of a stream that read it, and the last one that wrote it.
    touched: dict[str, dict[tuple[str, bool], int]] = {}
    for index, step in enumerate(steps):
        known = over.setdefault(step.stream, {})
        for other in step.waits_for:
            seen = {**over.get(other, {}), **({other: last[other]} if other in last else {})}
            for name, place in seen.items():
                known[name] = max(place, known.get(name, -1))
        for buffer in dict.fromkeys((*step.reads, *step.writes)):
            is_write = buffer in step.writes
            uses = touched.setdefault(buffer, {})
            for (stream, was_write), place in uses.items():
                is_free = stream == step.stream or place <= known.get(stream, -1)
                if not is_free and (is_write or was_write):
                    return (
                        f"step {index} ({step.op}) on the stream {step.stream} "
                        f"{'writes' if is_write else 'reads'} {buffer} without waiting for step "
                        f"{place} ({steps[place].op}) on the stream {stream}, which "
                        f"{'writes' if was_write else 'reads'} it"
                    )
            uses[step.stream, is_write] = index
        last[step.stream] = index
    return None


class SideStreams:
    """The streams beside whichever is torch's current one; each is made when it is first needed.

    Of one device, and of one thread at a time.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}

    def launch(self, steps: Sequence[Streamed]) -> None:
        """Launches steps that follow each other, each on its stream.

        All streams are forked from the current one and joined with it again, so that what is
        launched there next finds everything over, and a recording of it is whole.
        """
        if all(step.stream == MAIN for step in steps):
            for step in steps:
                step.run()
            return
        current: Any = torch.cuda.current_stream()
        begun: dict[str, Any] = {MAIN: current}
        for step in steps:
            # What another stream was given before these steps was joined behind them.
            waits = [name for name in step.waits_for if name in begun]
            if step.stream not in begun:
                begun[step.stream] = self._stream(step.stream)
                waits = [*dict.fromkeys((MAIN, *waits))]
            for name in waits:
                begun[step.stream].wait_stream(begun[name])
            with torch.cuda.stream(begun[step.stream]):
                step.run()
        for name, stream in begun.items():
            if name != MAIN:
                current.wait_stream(stream)

    def _stream(self, name: str) -> Any:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._streams[name]
