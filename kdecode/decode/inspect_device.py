"""What every step of a plan costs on a CUDA device, by the device's own clock.

Owns the timing: the first n steps are recorded as a CUDA graph and replayed, for every n, and a
step costs what it adds. So each is timed where it stands, behind the steps before it and without
what a launch costs the host. Every replay finds none of its weights in the last-level cache. A plan
that cannot be recorded is launched step by step instead, and the result says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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


class DevicePlanProbe(PlanProbe):
    """`PlanProbe` of a plan on a CUDA device."""

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
                return _microseconds(graph.replay, cold, _TUNING_RUNS)

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
            before, spent = spent, _microseconds(run, cold, runs)
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
        return lambda: sides.launch(steps)

    def _run_once(self) -> list[int | None]:
        """Distinct experts of the steps that run some; everything is compiled and loaded then."""
        chosen: list[int | None] = []
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


def _microseconds(run: Callable[[], None], cold: torch.Tensor, runs: int) -> float:
    """Median from the first launch of a run to the end of its last one."""
    spent: list[float] = []
    for _ in range(runs + 2):
        cold.sum()
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) * 1000)
    return median(spent[2:])


def _record(pool: GraphPool, run: Callable[[], None]) -> Any:
    """The graph, or in words why there is none."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    reason = None
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle)
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
    """Launches, copies and fills of a graph, which the driver tells."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    status = driver.cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    if status:
        raise RuntimeError(f"The CUDA driver cannot tell the nodes of a graph: error {status}.")
    return count.value
