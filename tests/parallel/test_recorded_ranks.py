"""Standard steps of ranks on GPUs as CUDA graphs, as far as it shows without one: on pretended GPUs
whose graphs are tapes, with gloo below NCCL's name and through memory that processes share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from pretend_device import PretendTensor, pretend_cuda
from pretended_gpus import PATCHES, SYMMETRIC_PATCHES, PretendedMemory
from pretended_graphs import GRAPH_PATCHES, Tape, TapePool
from recorded_steps import follow_recorded, make_runner, run_both
from torch.distributed import HashStore  # type: ignore[attr-defined]

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode import auto, standard_graph
from kdecode.decode.runner import StepRunner
from kdecode.model.outline import outline_model
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.rank_share import share_of
from kdecode.parallel import launch, nccl
from kdecode.parallel.context import ContextShare
from kdecode.parallel.group import Group
from kdecode.parallel.nccl import NcclExchange
from kdecode.parallel.ranks import RankError, Ranks
from kdecode.parallel.symmetric import SymmetricExchange

pytestmark = pytest.mark.interpreter
TRANSPORTS = ("symmetric", "nccl")
WORDS = {"kill": "died with signal 9", "raise": "raised ZeroDivisionError: as the drill wants it"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has a pretended GPU, whose memory other ranks share, and graphs of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for patch in (*PATCHES, *SYMMETRIC_PATCHES, *GRAPH_PATCHES):
        monkeypatch.setattr(*patch)
    monkeypatch.setattr(TapePool, "made", [])
    monkeypatch.setattr(Tape, "given", [])
    with pretend_cuda():
        yield
    torch.set_num_threads(threads)


@contextmanager
def ranks(
    transport: str, fault: str = "", *, with_triton: bool = True
) -> Iterator[tuple[Group, StepRunner]]:
    """Rank 0 of two; the fault is the other's, and so is what it is without."""
    group = launch.start(2, follow_recorded, (transport, fault, with_triton), timeout_s=30.0)
    try:
        runner = make_runner(group, transport)
        group.wait_until_ready()
        yield group, runner
        runner.close()
    finally:
        group.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replayed_steps_have_the_bits_of_launched_ones(gpu: None, transport: str) -> None:
    """On both ranks, of which rank 0 records parts of a step, where a draft reads it, and the other
    whole ones; for other requests each time, with launched steps between."""
    with ranks(transport) as (group, runner):
        assert sorted(runner._recorded) == [1, 2]
        (pool,) = TapePool.made
        assert len(pool.tapes) == 2 * len(runner._recorded)
        for contexts in ([5, 66], [70]):
            group.send(contexts)
            first, second = run_both(group, runner, contexts).chunk(2, dim=1)
            assert torch.equal(first, second)
        assert runner.stats.recorded_steps == 2
        # Of a block that is written twice in a row the other rank may still read.
        assert bool(Tape.given) == (transport == "symmetric")
        assert all(before != after for before, after in pairwise(Tape.given))
    with pytest.raises(RuntimeError, match="was reset"):
        pool.tapes[0].replay()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_while_all_record_is_named(
    gpu: None, transport: str, fault: str
) -> None:
    words = rf"Rank 1 of 2 \(process \d+\) {WORDS[fault]}"
    with pytest.raises(RankError, match=words), ranks(transport, fault):
        pass


def test_nothing_is_recorded_where_a_rank_cannot(
    gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with ranks("symmetric", with_triton=False) as (_, runner):
        assert runner._recorded == {}
        assert TapePool.made == []
    assert "launched one by one and not as CUDA graphs: another rank cannot" in caplog.text


def test_attention_to_a_shared_context_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "has_triton", lambda device: True)
    config = share_of(ModelConfig.from_checkpoint(released_config(PRESETS["mini-16"])), 2)
    packed = outline_model(config, "rows", "mxfp4_rows", Ranks(0, 2))
    engine = EngineConfig(max_context_tokens=64)
    waiting = {}
    for shared in (False, True):
        context = {"context": ContextShare(Ranks(0, 2), 1)} if shared else {}
        caches = Caches.allocate(config, "meta", 1, 1, 64, **context)
        plan = auto.build_auto_plan(packed, caches, engine, Ranks(0, 2))
        waiting[shared] = standard_graph.waiting_ops(plan)
    assert waiting == {False: [], True: ["mla_attention"]}


class Whole:
    """The watch of a group that is never broken."""

    def check(self) -> None:
        """It is whole."""


def test_a_step_goes_through_the_same_blocks_whichever_was_before_it(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never twice in a row through one: a rank may still read of it."""
    alone = Ranks(0, 1)
    memory = PretendedMemory(HashStore(), alone, "cuda:0")
    exchange = SymmetricExchange(memory, alone, Whole(), 30.0, "cuda:0")  # type: ignore[arg-type]
    given: list[int] = []
    give = exchange._kernels.give_launch

    def noting(words: Any, block: Any, counter: Any) -> Any:
        given.append(block.part.data_ptr())
        return give(words, block, counter)

    monkeypatch.setattr(exchange._kernels, "give_launch", noting)
    part = torch.ones(1, 8, device="cuda")
    steps = []
    # Behind an exchange that is no step's, as those of warming up and measuring are.
    exchange.gather(part)
    for count in (2, 5, 4, 3, 3):
        exchange.begin()
        begin = len(given)
        for _ in range(count):
            assert isinstance(exchange.reduce(part), PretendTensor)
        steps.append(given[begin:])
        if count == 4:
            exchange.meet()
    longest = max(steps, key=len)
    assert all(step == longest[: len(step)] for step in steps)
    assert all(before != after for before, after in pairwise(given))
    exchange.settle()


class Recorded:
    """NCCL's connections that a graph has exchanges of: an abort waits for its end."""

    def __init__(self) -> None:
        self.graph_ended = threading.Event()

    def abort(self) -> None:
        self.graph_ended.wait()


def test_whoever_closes_a_group_does_not_wait_for_its_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "_CLOSE_S", 0.05)
    connections = Recorded()
    exchange = NcclExchange(connections, Ranks(0, 1), Whole(), 30.0, "cuda:0")  # type: ignore[arg-type]
    exchange.close()
    # It has returned although no graph has ended; again, nothing is left to be closed.
    assert not connections.graph_ended.is_set()
    exchange.close()
    connections.graph_ended.set()
