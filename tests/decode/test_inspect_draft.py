"""What a draft's round costs: of plans on a GPU by graphs and a clock that are made up here, of a
draft in torch by the host's clock. `tests/gpu` has those of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_cuda_cases import small_parts
from draft_rounds import NUM_DRAFTS

from kdecode.bench import roofline
from kdecode.cache.caches import Caches
from kdecode.commands import bench_layer
from kdecode.commands.bench_layer import title
from kdecode.config import EngineConfig
from kdecode.decode import inspect_device
from kdecode.decode.draft_device import CudaDraft
from kdecode.decode.draft_standard import StandardDraft
from kdecode.decode.inspect_draft import DraftCost, inspect_draft
from kdecode.decode.traffic import stage_weight_bytes
from kdecode.model.draft_layout import pack_draft
from kdecode.model.stages import layer_stages

CONTEXT = 40
LAYERS = 2


def _planned(is_grouped: bool) -> tuple[CudaDraft, Caches]:
    own = small_parts(2, is_grouped=is_grouped)
    draft = CudaDraft(
        own.case.weights,
        own.case.config,
        own.target,
        own.caches,
        own.deployment,
        NUM_DRAFTS,
        None,
    )
    return draft, own.caches


def _make_up(monkeypatch: pytest.MonkeyPatch, each: float, runs: int) -> list[int]:
    """Graphs of so many launches as they have steps, which run nothing; a step takes ``each``
    microseconds. Returns the steps of every replay that was timed."""
    ran: list[int] = []

    def record(pool: None, run: Callable[[], None]) -> Any:
        count = 0

        def counted(steps: Any) -> None:
            nonlocal count
            count = len(steps)

        monkeypatch.setattr(inspect_device.SideStreams, "launch", lambda _, steps: counted(steps))
        run()
        return SimpleNamespace(replay=lambda: None, nodes=count)

    class Event:
        """Of pairs around a replay; the k-th graph, which has k steps, is replayed two times more
        than there are runs."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            ran.append(len(ran) // (runs + 2) + 1)
            return each * ran[-1] / 1000

    monkeypatch.setattr(inspect_device, "GraphPool", lambda: None)
    monkeypatch.setattr(inspect_device, "_COLD_BYTES", 4)
    monkeypatch.setattr(inspect_device, "_record", record)
    monkeypatch.setattr(inspect_device, "_num_nodes", lambda graph: graph.nodes)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return ran


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_round_costs_what_its_launches_add(
    monkeypatch: pytest.MonkeyPatch, is_grouped: bool
) -> None:
    draft, caches = _planned(is_grouped)
    ran = _make_up(monkeypatch, each=2.0, runs=3)
    cost = inspect_draft(draft, caches, NUM_DRAFTS, CONTEXT, 3)
    assert cost.plan is not None
    block = len(cost.plan.steps)
    # A choice for each draft and the confidence; draft_context, and draft_insert of every layer.
    behind, append = NUM_DRAFTS + 1, 1 + LAYERS
    assert ran == [count + 1 for count in range(block + behind + append) for _ in range(3 + 2)]
    assert block == 2 + LAYERS * (8 if is_grouped else 10)
    assert cost.plan.steps[-1].covers == ("head",)
    assert {step.launches for step in cost.plan.steps} == {1}
    assert cost.block_microseconds == cost.plan.plan_microseconds == 2.0 * block
    assert cost.markov_microseconds == 2.0 * behind
    assert cost.append_microseconds == 2.0 * append
    weights, config = draft.stack, draft.config
    assert cost.markov_bytes > NUM_DRAFTS * config.vocab_size * config.markov_rank * 2
    cached = 2 * sum(config.cache_width * config.hidden_size for _ in weights.layers)
    assert cost.append_bytes == cached + len(config.taps) * config.hidden_size**2 * 2
    for layer, kind in enumerate(weights.config.layer_kinds):
        assert kind == ("gqa" if is_grouped else "mla")
        stages = layer_stages(weights.config, layer)
        moved = sum(step.weight_bytes for step in cost.plan.steps if step.layer == layer)
        assert moved == sum(stage_weight_bytes(weights, layer, stage) for stage in stages)
    assert caches.page_pool.num_free == caches.num_pages
    text = title(cost.plan, EngineConfig())
    assert f"{NUM_DRAFTS} rows, {NUM_DRAFTS} a request, {CONTEXT} tokens of context" in text
    assert f"{block} launches a step; timed as replays of a CUDA graph" in text


def test_what_a_window_hides_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, caches = _planned(True)
    assert draft.config.window == 20
    _make_up(monkeypatch, each=1.0, runs=1)
    bytes_of = []
    for context in (10, 20, 40):
        cost = inspect_draft(draft, caches, NUM_DRAFTS, context, 1)
        assert cost.plan is not None
        attended = [step for step in cost.plan.steps if step.op == "gqa_attend"]
        bytes_of.append(attended[0].state_bytes)
    width = 2 * draft.config.cache_width
    assert bytes_of == [width * (seen + NUM_DRAFTS - 1) for seen in (10, 20, 20)]


def test_a_draft_in_torch_is_timed_as_it_is_launched() -> None:
    own = small_parts(2, is_grouped=True)
    config, engine = own.case.config, EngineConfig(page_tokens=own.caches.page_tokens)
    packed = pack_draft(own.case.p, config, "cpu")
    draft = StandardDraft(packed, config, own.target, own.caches, engine)
    cost = inspect_draft(draft, own.caches, NUM_DRAFTS, CONTEXT, 1)
    assert cost.plan is None
    assert cost.num_drafts == NUM_DRAFTS
    assert min(cost.block_microseconds, cost.append_microseconds) > 0
    assert cost.markov_microseconds >= 0
    # The products are not rounded, so that torch has their weights in fp32.
    assert cost.markov_bytes == NUM_DRAFTS * config.vocab_size * config.markov_rank * 4
    stack = sum(
        2 * (layer.gate_up.numel() + layer.down.numel() + layer.attention.o_proj.numel())
        for layer in packed.layers
    )
    assert cost.block_bytes > stack + 2 * config.vocab_size * config.hidden_size
    assert cost.append_bytes > 2 * packed.context_proj.numel()
    with pytest.raises(ValueError, match="0 timed runs"):
        inspect_draft(draft, own.caches, NUM_DRAFTS, CONTEXT, 0)


def test_the_command_prints_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor is that of memory that reads 1 GB/s."""
    monkeypatch.setattr(roofline, "share_of_floor", lambda size, seconds, speed: 0.5)
    in_torch = DraftCost(None, 3, 1500.0, 2**20, 20.0, 2**19, 300.0, 2**18)
    llm: Any = SimpleNamespace(inspect_draft=lambda context, runs: in_torch)
    args: Any = SimpleNamespace(context_tokens=16, runs=1)
    document, text = bench_layer._draft(llm, args, 1e9)
    assert document["plan"] is None
    assert text.splitlines() == [
        "the draft in torch: 3 drafts, 16 tokens of context; timed as it is launched",
        "the block: 1,500 us, 1.0 MiB, 50% of the floor",
        "3 Markov products with the choice of a draft: 20 us, 0.5 MiB, 50% of the floor",
        "caching 4 committed tokens: 300 us, 0.2 MiB, 50% of the floor",
    ]
