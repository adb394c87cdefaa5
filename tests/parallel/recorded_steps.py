"""One rank's part in standard steps that are replayed, on a pretended GPU whose graphs are tapes.

Every rank runs the same batches twice: as its runner does, and launched one operation after the
other on caches of their own, through the same exchange in between; both have to have the same bits.
Imported by other processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from cuda_cases import CONFIGS, decode_batch
from engine_faults import arm_recording
from native_cases import PAGE_TOKENS
from pretend_device import pretend_cuda
from pretended_graphs import GRAPH_PATCHES, Tape, become_recording
from rank_cuts import divisible, rank_case
from torch import Tensor
from triton_cases import make_case

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode import auto
from kdecode.decode.rank_link import Compare, RankLink
from kdecode.decode.runner import StepRunner, resolve
from kdecode.decode.verify import copy_caches
from kdecode.model.layout import to_device
from kdecode.parallel.group import Group

# A draft that reads the first layer, so that rank 0 records two parts of a step.
TAPPED: Any = SimpleNamespace(taps=(0,), tap_stream="prefix")


def config() -> ModelConfig:
    """Each kind of attention and of MLP once; quick in the interpreter."""
    base = divisible(CONFIGS["k3"])
    return replace(base, layer_kinds=("kda", "mla"), mlp_kinds=("dense", "moe"))


def follow_recorded(group: Group, transport: str, fault: str, with_triton: bool) -> None:
    """fault: in the second number of rows that is recorded, "" for none. with_triton: whether this
    rank's standard forward can be recorded."""
    become_recording(transport, GRAPH_PATCHES)
    torch.set_num_threads(1)
    if not with_triton:
        auto.has_triton = lambda device: False
    if fault:
        arm_recording(fault)
    with pretend_cuda():
        runner = make_runner(group, transport)
        group.tell_ready()
        while (contexts := group.receive()) is not None:
            run_both(group, runner, contexts)
        runner.close()


def make_runner(group: Group, transport: str) -> StepRunner:
    group.use_device("cuda:0", transport)
    share = rank_case(make_case(config()), group.ranks)
    engine = EngineConfig(device="cuda:0", page_tokens=PAGE_TOKENS, max_context_tokens=256)
    engine = replace(resolve(engine), max_requests=2, num_threads=1)

    @contextmanager
    def around_step(batch: StepBatch) -> Iterator[Compare]:
        group.begin()
        yield lambda prefix: None
        group.settle()

    link = RankLink(group.ranks, group.exchange, group.shared, around_step)
    draft = TAPPED if group.ranks.is_leader else None
    caches = Caches.allocate(share.config, "cuda", 4, 16, PAGE_TOKENS)
    return StepRunner(to_device(share.packed, "cuda"), caches, engine, draft, link=link)


def run_both(group: Group, runner: StepRunner, contexts: list[int]) -> Tensor:
    """Logits of every rank side by side, of rows that decode behind so many tokens."""
    caches = runner._caches
    batch = decode_batch(contexts)
    batch = StepBatch(tuple(replace(r, slot=r.slot % caches.num_slots) for r in batch.requests))
    batch = StepBatch(
        tuple(
            replace(r, pages=tuple(p % caches.num_pages for p in r.pages)) for r in batch.requests
        )
    )
    twins = Caches.allocate(runner.config, "cuda", 4, 16, PAGE_TOKENS)
    copy_caches(caches, twins)
    link = runner._link
    assert link is not None
    plan = auto.build_auto_plan(runner._packed, twins, runner.engine, group.ranks, link.exchange)
    first = len(Tape.given)
    with link.around_step(batch):
        launched = auto.run_standard(plan, batch)
    before = runner.stats.recorded_steps
    replayed = runner.run(batch)
    assert torch.equal(replayed, launched), "A replay has other logits than launches."
    blocks, count = Tape.given[first:], (len(Tape.given) - first) // 2
    assert blocks[:count] == blocks[count:], "A replay goes through other blocks than launches."
    for layer, states in twins.recurrent.items():
        assert torch.equal(caches.recurrent[layer], states), f"state of layer {layer}"
    for layer, pages in twins.pages.items():
        assert torch.equal(caches.pages[layer], pages), f"pages of layer {layer}"
    assert runner.stats.recorded_steps == before + bool(runner._recorded)
    return group.control.gather(replayed.cpu())
