"""Costs of steps from replays of growing graphs; the graphs and their clock are made up here.

`tests/gpu` has them on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdecode.commands.bench_layer import title
from kdecode.decode import inspect_device
from kdecode.decode.inspect import PlanCost
from kdecode.decode.inspect_device import DevicePlanProbe
from kdecode.engine.engine import LLM

CONTEXT = 40


@pytest.fixture(scope="module")
def llm(mini_checkpoint: Path) -> LLM:
    return LLM(
        mini_checkpoint,
        decode_backend="latency_specialized",
        num_threads=1,
        page_tokens=16,
        max_context_tokens=64,
        max_requests=4,
    )


def _measured(llm: LLM, rows: int, each: int = 1) -> PlanCost:
    worker, plan = llm._worker, llm.decode_plan(rows)
    if each > 1:
        plan = worker.runner.verify_plan(rows // each, each)
    with DevicePlanProbe(worker.packed, plan, worker.caches, rows, CONTEXT, 1, each) as probe:
        return probe.measure(2)


def _make_up(
    monkeypatch: pytest.MonkeyPatch, record: Callable[..., Any], times: list[float]
) -> list[int]:
    """Graphs by ``record``; each timed run takes the next of ``times``. Returns how many ran."""
    ran: list[int] = []

    def timed(run: Callable[[], None], cold: Any, runs: int, meet: Any) -> list[float]:
        run()
        ran.append(runs)
        return [times[len(ran) - 1]]

    monkeypatch.setattr(inspect_device, "GraphPool", lambda: None)
    monkeypatch.setattr(inspect_device, "_COLD_BYTES", 4)
    monkeypatch.setattr(inspect_device, "_record", record)
    monkeypatch.setattr(inspect_device, "_num_nodes", lambda graph: graph.nodes)
    monkeypatch.setattr(inspect_device, "_microseconds", timed)
    return ran


@pytest.mark.parametrize(("rows", "each"), [(1, 1), (4, 4)])
def test_a_step_costs_what_it_adds_to_the_steps_before_it(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, rows: int, each: int
) -> None:
    graphs: list[Any] = []

    def record(pool: None, run: Callable[[], None]) -> Any:
        # The first is of the whole plan; then come one step, two steps and so on.
        graphs.append(SimpleNamespace(replay=run, nodes=3 * len(graphs)))
        return graphs[-1]

    count = len(llm.decode_plan(1).steps)
    # The third replay is faster than the second, which had two steps only.
    times = [10.0, 14.0, 13.0, *(13.0 + 2 * n for n in range(1, count - 2))]
    ran = _make_up(monkeypatch, record, times)
    cost = _measured(llm, rows, each)
    assert ran == [2] * count
    assert [step.microseconds for step in cost.steps[:4]] == [10.0, 4.0, 0.0, 2.0]
    assert {step.launches for step in cost.steps} == {3}
    assert cost.plan_microseconds == times[-1]
    assert (cost.rows, cost.rows_per_request) == (rows, each)
    chosen = [step.distinct_experts for step in cost.steps if step.distinct_experts]
    assert len(chosen) == llm.model_config.mlp_kinds.count("moe")
    text = title(cost, llm.engine_config)
    assert f"{3 * count} launches a step; timed as replays of a CUDA graph" in text
    assert llm.stats()["pages_used"] == llm.stats()["slots_used"] == 0


def test_a_plan_that_cannot_be_recorded_is_timed_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    count = len(llm.decode_plan(1).steps)
    reason = "operation not permitted when stream is capturing"
    _make_up(monkeypatch, lambda pool, run: reason, [float(n) for n in range(count)])
    cost = _measured(llm, 1)
    assert cost.timed_as == f"timed without a CUDA graph: {reason}"
    assert {step.launches for step in cost.steps} == {None}
    assert cost.plan_microseconds == count - 1


def test_no_runs_are_refused(llm: LLM) -> None:
    plan, worker = llm.decode_plan(1), llm._worker
    with (
        DevicePlanProbe(worker.packed, plan, worker.caches, 1, CONTEXT, 1) as probe,
        pytest.raises(ValueError, match="0 timed runs"),
    ):
        probe.measure(0)


class Driver:
    """CUDA's, of a graph of a kernel, NCCL's marks of where it is, a copy and a fill."""

    kinds = (0, 7, 6, 1, 5, 2)

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.kinds)
        for index in range(len(self.kinds) if nodes is not None else 0):
            nodes[index] = index + 1
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self.kinds[node.value - 1]
        return 0


def test_what_only_orders_launches_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace(raw_cuda_graph=lambda: 1)
    monkeypatch.setattr(inspect_device.ctypes, "CDLL", lambda name: Driver())
    assert inspect_device._num_nodes(graph) == 3
    monkeypatch.setattr(Driver, "cuGraphNodeGetType", lambda self, node, kind: 400)
    with pytest.raises(RuntimeError, match="cannot tell the nodes of a graph: error 400"):
        inspect_device._num_nodes(graph)


def test_replays_of_several_ranks_begin_together_and_last_as_long_as_the_slowest(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """Its microseconds are the medians of the slowest runs, and a step adds to those."""
    worker, plan = llm._worker, llm.decode_plan(1)
    met: list[str] = []
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            """Everything is done at once."""

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1000

    def record(pool: None, run: Callable[[], None]) -> Any:
        def replay() -> None:
            met.append("replay")
            now[0] += 1.0

        run()
        return SimpleNamespace(replay=replay, nodes=len(met))

    monkeypatch.setattr(inspect_device, "GraphPool", lambda: None)
    monkeypatch.setattr(inspect_device, "_COLD_BYTES", 4)
    monkeypatch.setattr(inspect_device, "_record", record)
    monkeypatch.setattr(inspect_device, "_num_nodes", lambda graph: 1)
    monkeypatch.setattr("torch.cuda.Event", Event)
    asked: list[list[float]] = []

    def slowest(spent: Any) -> list[float]:
        asked.append([*spent])
        return [len(asked) + each for each in spent]

    together = inspect_device.Together(
        lambda: met.append("rewind"), lambda: met.append("meet"), slowest
    )
    with DevicePlanProbe(worker.packed, plan, worker.caches, 1, CONTEXT, 1) as probe:
        probe.together = together
        cost = probe.measure(3)
    assert asked == [[1.0] * 3] * len(plan.steps)
    assert [step.microseconds for step in cost.steps] == [2.0] + [1.0] * (len(plan.steps) - 1)
    # Once by itself, once for the whole, and for every recording of its beginning.
    assert met.count("rewind") == 2 + len(plan.steps)
    replays = [index for index, what in enumerate(met) if what == "replay"]
    assert len(replays) == 5 * len(plan.steps)
    assert all(met[index - 1] == "meet" for index in replays)
