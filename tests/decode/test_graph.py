"""What graphs are made of and when they are replayed; recording itself needs a GPU (`tests/gpu`).

The pool here keeps what it was given and runs it again where a GPU would replay it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
from cuda_cases import CONFIGS, Twins, deployment
from native_cases import PAGE_TOKENS, Loaded, make_requests
from torch import Tensor
from triton_cases import make_case

from kdecode.cache.batch import StepBatch
from kdecode.config import EngineConfig
from kdecode.decode import auto, latency_specialized, runner, standard_graph
from kdecode.decode.graph import GraphPool, capture
from kdecode.decode.plan import DecodePlan, Step
from kdecode.decode.runner import load_inputs
from kdecode.decode.staging import stage_inputs
from kdecode.decode.step_tensors import decode_rows
from kdecode.decode.streams import SideStreams
from kdecode.decode.verify import copy_caches
from kdecode.kernels.contract import Buffers, PlanMemory
from kdecode.model.outline import outline_model
from kdecode.testing.compare import bit_equal


@dataclass
class Replayed:
    """Runs again what was recorded, into the tensors that the recording made."""

    again: Callable[[], None]
    buffers: Buffers
    kept: dict[str, Tensor]

    def replay(self) -> None:
        self.again()
        for name, tensor in self.kept.items():
            tensor.copy_(self.buffers[name])


@dataclass
class Pool:
    """`GraphPool` without a GPU."""

    buffers: Buffers
    recorded: int = 0
    sides: SideStreams = field(default_factory=SideStreams)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], None]) -> Replayed:
        self.recorded += 1
        run()
        return Replayed(run, self.buffers, dict(self.buffers))


def _noting(plan: DecodePlan, ran: list[int]) -> DecodePlan:
    """Steps that only note their number, and inputs that exist."""

    def note(index: int, step: Step) -> Step:
        return replace(step, run=lambda: ran.append(index))

    buffers = stage_inputs(plan.buffer_specs, PlanMemory("cpu"))
    steps = tuple(note(*pair) for pair in enumerate(plan.steps))
    return replace(plan, steps=steps, buffers=buffers, launch=None)


def test_ranges_that_were_recorded_are_replayed_and_others_launched() -> None:
    config, ran = CONFIGS["k3"], list[int]()
    packed = outline_model(config, "rows", "mxfp4_rows")
    plan = _noting(latency_specialized.describe(deployment(config), packed, 6, 3), ran)
    count = len(plan.steps)
    plan.buffers.caches = Twins.of(Loaded(packed, make_case(config).parameters)).theirs
    plan.buffers.caches.recurrent[0].fill_(7.0)
    pool = Pool(plan.buffers)
    recorded = capture(plan, pool, [(0, 4), (4, count)])  # type: ignore[arg-type]
    # Once to warm up, then each graph.
    assert pool.recorded == 3
    assert sorted(ran[:count]) == list(range(count))
    assert len(ran) == 3 * count
    # The rows that it ran on were made up, and on a slot that is free.
    assert plan.buffers["row_position"].tolist() == [0, 1, 2, 0, 1, 2]
    assert not plan.buffers["row_slot"].any()
    assert not plan.buffers.caches.recurrent[0][0].any()
    assert plan.buffers.caches.recurrent[0][1].all()
    for begin, end in ((0, count), (4, count), (2, 5)):
        ran.clear()
        recorded.run_range(begin, end)
        assert ran == list(range(begin, end))
    assert recorded.explain().splitlines()[-2] == f"{count} steps in one CUDA graph"


@pytest.fixture(scope="module")
def standard() -> tuple[Loaded, Twins, Twins]:
    case = make_case(CONFIGS["k3"])
    loaded = Loaded(case.packed, case.parameters)
    return loaded, Twins.of(loaded), Twins.of(loaded)


def test_recorded_steps_of_the_standard_path_find_their_rows_on_the_device(
    standard: tuple[Loaded, Twins, Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests at each replay, and the bits of steps whose metadata the host derives."""
    loaded, ours, others = standard
    engine = EngineConfig(max_context_tokens=256, page_tokens=PAGE_TOKENS)
    monkeypatch.setattr(auto, "has_triton", lambda device: True)
    plan = auto.build_auto_plan(loaded.packed, ours.theirs, engine)
    assert standard_graph.waiting_ops(plan) == []
    ranges = [(0, 9), (9, len(plan.steps))]
    pool = Pool(plan.buffers)
    recorded = standard_graph.record(plan, 2, 4, pool, ranges)  # type: ignore[arg-type]
    launched = auto.build_auto_plan(loaded.packed, others.theirs, engine)
    for turn, contexts in enumerate(([0, 70], [64, 5])):
        batch = StepBatch(make_requests([*range(turn), *contexts])[turn:])
        assert standard_graph.takes(batch)
        ours.fill(batch, seed=turn)
        copy_caches(ours.theirs, others.theirs)
        load_inputs(recorded, batch)
        for begin, end in ranges:
            recorded.run_range(begin, end)
        wanted = _launched(launched, batch)
        bit_equal(recorded.buffers["logits"], wanted, f"logits of turn {turn}")
        for layer, states in others.theirs.recurrent.items():
            slots = [request.slot for request in batch.requests]
            bit_equal(ours.theirs.recurrent[layer][slots], states[slots], f"state {layer}")


def _launched(plan: DecodePlan, batch: StepBatch) -> Tensor:
    """The step as a device has it without graphs."""
    auto.load_step(plan, batch)
    tensors = plan.buffers.step
    rows = decode_rows(batch, plan.buffers.limits, "cpu")
    plan.buffers.step = replace(tensors, decode_rows=rows)
    with torch.no_grad():
        plan.run()
    return plan.buffers["logits"]


def test_a_runner_replays_the_plan_of_a_decode_step(
    standard: tuple[Loaded, Twins, Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prompt on the standard path, with the logits of that path."""
    loaded, ours, others = standard
    pools: list[Pool] = []
    monkeypatch.setattr(runner, "deployment_of", lambda config, engine, ranks: deployment(config))
    monkeypatch.setattr(runner, "row_buckets", lambda engine: (1,))
    monkeypatch.setattr(runner, "GraphPool", lambda: pools.append(Pool(Buffers())) or pools[-1])
    settings = {"max_context_tokens": 256, "page_tokens": PAGE_TOKENS}
    engine = runner.resolve(EngineConfig(decode_backend="latency_specialized", **settings))
    (request,) = make_requests([9])
    ours.fill(StepBatch((request,)), seed=5)
    copy_caches(ours.theirs, others.theirs)
    steps = runner.StepRunner(loaded.packed, ours.theirs, engine)
    assert [pool.recorded for pool in pools] == [1]
    prompt = replace(request, token_ids=(1, 2, 3), start=0, is_decode=False)
    plain = auto.build_auto_plan(loaded.packed, others.theirs, engine)
    for batch in (StepBatch((prompt,)), StepBatch((replace(request, start=3),))):
        found, wanted = steps.run(batch), auto.run_standard(plain, batch)
    assert steps.last_path == (runner.SPECIALIZED, "")
    assert steps.stats.coverage == 1.0
    error = (found.cpu() - wanted).square().mean() / wanted.square().mean()
    assert error.sqrt() < 0.03


def test_steps_that_are_not_recorded() -> None:
    request, other = make_requests([5, 9])
    assert standard_graph.takes(StepBatch((request, other)))
    for changes in (
        {"token_ids": (1, 2)},
        {"needs_logits": False},
        {"is_verify": True},
    ):
        changed = replace(other, **changes)
        assert not standard_graph.takes(StepBatch((request, changed))), changes


class Graph:
    """`torch.cuda.CUDAGraph` without a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **settings: self.calls.append(name)


def test_a_pool_ends_the_graphs_that_somebody_still_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    pool = GraphPool()
    graphs = [pool.record(lambda: None) for _ in range(2)]
    pool.close()
    pool.close()
    for graph in graphs:
        assert graph.calls == ["capture_begin", "capture_end", "reset"]
