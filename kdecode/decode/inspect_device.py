"""What every step of a plan costs on a CUDA device, by the device's own clock.

Owns the timing: the first n steps are recorded as a CUDA graph and replayed, for every n, and a
step costs what it adds. So each is timed where it stands, behind the steps before it and without
what a launch costs the host. Every replay finds none of its weights in the last-level cache. A plan
that cannot be recorded is launched step by step instead, and the result says so. Of several ranks
all time the same plan together: every replay begins once all have come as far, and is over when the
slowest one is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from kdecode.cache.caches import Caches
from kdecode.decode.device import on_device, wait_for
from kdecode.decode.graph import GraphPool
from kdecode.decode.inspect import PlanCost, PlanProbe, StepCost
from kdecode.decode.plan import DecodePlan
from kdecode.decode.streams import SideStreams
from kdecode.decode.traffic import runs_experts
from kdecode.decode.tune import Tuned, tune
from kdecode.model.layout import PackedModel

# Read before each replay: several times any last-level cache.
_COLD_BYTES = 256 << 20
# Replays of a step with one tile.
_TUNING_RUNS = 25
_AS_GRAPH = "timed as replays of a CUDA graph"
# Of what cuGraphNodeGetType tells: a kernel, a copy, a fill.
_LAUNCHES = (0, 1, 2)


@dataclass(frozen=True)
class Together:
    """What a rank's probe does for those of the others.

    rewind: before what is recorded; see `Exchange.rewind`. meet: launches that no rank comes past
    before all have come so far. slowest: microseconds of this rank's runs, one after the other; of
    each run the most of any rank.
    """

    rewind: Callable[[], None]
    meet: Callable[[], None]
    slowest: Callable[[Sequence[float]], Sequence[float]]


ALONE = Together(lambda: None, lambda: None, lambda spent: spent)


class DevicePlanProbe(PlanProbe):
    """`PlanProbe` of a plan on a CUDA device. together: of several ranks, before it measures."""

    together = ALONE

    def measure(self, runs: int) -> PlanCost:
        """Of ``runs`` replays of each graph; two more come first."""
        if runs < 1:
            raise ValueError(f"{runs} timed runs; there has to be at least 1.")
        with torch.no_grad(), on_device(self._device):
            self._load()
            try:
                experts = self._run_once()
                return self._measured(runs, experts)
            finally:
                self._commit()

    def tune(self, build: Callable[[], DecodePlan], kernels: Sequence[str]) -> Iterator[Tuned]:
        """The best tiles that `decode.tune` finds for the probe's requests.

        build: a plan like the probe's own, in whose buffers its inputs are.
        """
        with torch.no_grad(), on_device(self._device):
            pool, cold = GraphPool(), torch.ones(_COLD_BYTES // 4, device=self._device)

            def clock(run: Callable[[], None]) -> float:
                run()
                graph = _record(pool, run)
                if isinstance(graph, str):
                    raise RuntimeError(f"A step cannot be recorded as a CUDA graph: {graph}")
                return median(_microseconds(graph.replay, cold, _TUNING_RUNS))

            self._load()
            yield from tune(build, clock, kernels)

    def _measured(self, runs: int, experts: list[int | None]) -> PlanCost:
        pool, cold = GraphPool(), torch.ones(_COLD_BYTES // 4, device=self._device)
        sides = SideStreams()
        # All of it first: times with and without a graph could not be told apart from one another.
        whole = _record(pool, self._first(len(self._plan.steps), sides))
        how = f"timed without a CUDA graph: {whole}" if isinstance(whole, str) else _AS_GRAPH
        steps: list[StepCost] = []
        spent, launched = 0.0, 0
        for index, step in enumerate(self._plan.steps):
            run, launches = self._first(index + 1, sides), None
            if how == _AS_GRAPH:
                graph = _record(pool, run)
                run, total = graph.replay, _num_nodes(graph)
                launches, launched = total - launched, total
            timed = _microseconds(run, cold, runs, self.together.meet)
            before, spent = spent, median(self.together.slowest(timed))
            cost = self._cost(step, [(max(spent - before, 0.0), experts[index])])
            steps.append(replace(cost, launches=launches))
        return PlanCost(
            backend=self._plan.backend,
            rows=self._rows,
            context_tokens=self._context_tokens,
            steps=tuple(steps),
            plan_microseconds=spent,
            rows_per_request=self._each,
            timed_as=how,
        )

    def _first(self, count: int, sides: SideStreams) -> Callable[[], None]:
        """Launches so many steps, from the first on, each on its stream."""
        steps = self._plan.steps[:count]

        def run() -> None:
            self.together.rewind()
            sides.launch(steps)

        return run

    def _run_once(self) -> list[int | None]:
        """Distinct experts of the steps that run some; everything is compiled and loaded then."""
        chosen: list[int | None] = []
        self.together.rewind()
        for step in self._plan.steps:
            step.run()
            count = None
            if runs_experts(step.op, step.covers):
                ids = self._plan.buffers["route_ids"][: self._rows]
                count = len(set(ids.flatten().tolist()))
            chosen.append(count)
        wait_for(self._device)
        return chosen


def plan_probe(
    packed: PackedModel,
    plan: DecodePlan,
    caches: Caches,
    rows: int,
    context_tokens: int,
    num_threads: int,
    rows_per_request: int = 1,
) -> PlanProbe:
    """The probe that times a plan by the clock of the device that it runs on."""
    kind = DevicePlanProbe if packed.embed.is_cuda else PlanProbe
    return kind(packed, plan, caches, rows, context_tokens, num_threads, rows_per_request)


def _microseconds(
    run: Callable[[], None],
    cold: torch.Tensor,
    runs: int,
    meet: Callable[[], None] = ALONE.meet,
) -> list[float]:
    """From the first launch of a run to the end of its last one; two runs more come first.

    meet: see `Together`.
    """
    spent: list[float] = []
    for _ in range(runs + 2):
        cold.sum()
        meet()
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) * 1000)
    return spent[2:]


def _record(pool: GraphPool, run: Callable[[], None]) -> Any:
    """The graph, or in words why there is none."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    reason = None
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            run()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        try:
            graph.capture_end()
        except RuntimeError as error:
            # What went wrong first says more than that the recording is of no use.
            reason = reason or str(error).splitlines()[0]
    if reason is None:
        graph.instantiate()
    return reason or graph


def _num_nodes(graph: Any) -> int:
    """Launches, copies and fills of a graph, which the driver tells. What only orders them, as
    NCCL's marks of where it is, is none."""
    driver, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    statuses = [driver.cuGraphGetNodes(raw, None, ctypes.byref(count))]
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        statuses.append(driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)))
    found = 0
    for node in nodes:
        statuses.append(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        found += kind.value in _LAUNCHES
    if any(statuses):
        raise RuntimeError(
            f"The CUDA driver cannot tell the nodes of a graph: error {max(statuses)}."
        )
    return found
