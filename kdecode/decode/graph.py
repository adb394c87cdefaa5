"""CUDA graphs: the launches of a plan, recorded once and replayed by one call.

Owns warming up (whatever a first launch does is done before), recording, on as many streams as a
plan has (`streams`), and which range of steps a graph is for. A replay reads the inputs where the
recorded launches did, in the plan's own buffers, so that other requests, slots and positions need
nothing of the host but `load_inputs`. Does not know ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from kdecode.decode.latency_cuda import LAUNCHED_AS
from kdecode.decode.plan import DecodePlan
from kdecode.decode.staging import Staging
from kdecode.decode.streams import SideStreams

# Steps begin .. end - 1.
StepRange = tuple[int, int]


class GraphPool:
    """What the graphs of one engine share, as no two of them run at a time: memory and streams."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.sides = SideStreams()
        self._recorded: list[Any] = []

    def warm_up(self, run: Callable[[], None]) -> None:
        """Runs it where it will be recorded, and waits for it."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.synchronize()

    def record(self, run: Callable[[], None]) -> Any:
        """A graph of what ``run`` launches; nothing of it runs now."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            # What other threads do with the device meanwhile is no part of it, and no error.
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                # The error says more than that of a recording which has been broken off.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._recorded.append(graph)
        return graph

    def close(self) -> None:
        """Ends all of its graphs, also those that somebody still has; none can be replayed."""
        for graph in self._recorded:
            graph.reset()
        self._recorded.clear()


def capture(plan: DecodePlan, pool: GraphPool, ranges: Sequence[StepRange] = ()) -> DecodePlan:
    """The plan with a graph of all of its steps, and of each of ``ranges``.

    Other ranges are launched step by step, on one stream. The plan runs once before, on slot 0 and
    page 0 of its caches: they must be free, and the slots are cleared again.
    """
    made_up_inputs(plan.buffers.staging, plan.rows_per_request)
    pool.warm_up(lambda: _warm_up(plan))
    if plan.buffers.caches.conv:
        plan.buffers.caches.clear_slot(0)

    def record(begin: int, end: int) -> Any:
        return pool.record(lambda: pool.sides.launch(plan.steps[begin:end]))

    graphs = {span: record(*span) for span in {(0, len(plan.steps)), *ranges}}

    def launch(begin: int, end: int) -> None:
        graph = graphs.get((begin, end))
        if graph is None:
            _launch(plan, begin, end)
        else:
            graph.replay()

    return replace(plan, launch=launch, launched_as=LAUNCHED_AS)


def made_up_inputs(staging: Staging, rows_per_request: int) -> None:
    """Sends rows of token 0 on slot 0 and page 0, which exist; all may write the same places."""
    for name, rows in staging.arrays().items():
        rows.fill(0)
        if name == "row_position":
            rows[:] = [row % rows_per_request for row in range(len(rows))]
    staging.send()


def _warm_up(plan: DecodePlan) -> None:
    """Every kernel is compiled and loaded then."""
    _launch(plan, 0, len(plan.steps))
    if plan.commit is not None:
        plan.commit(())


def _launch(plan: DecodePlan, begin: int, end: int) -> None:
    for step in plan.steps[begin:end]:
        step.run()
