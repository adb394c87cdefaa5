"""Ranks with a GPU each, as far as it shows without one: on pretended devices, with gloo below
NCCL's name. What is exchanged is compared with what ranks of the CPU exchange."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_follow
import torch
from engine_faults import Fault
from pretend_device import PretendTensor, host, pretend_cuda
from pretended_gpus import PATCHES, PretendedNccl, follow_on_gpu
from processes import until
from ranked_engines import MAX_DISTANCE, PROMPTS, Single, build, distance, greedy, sharing
from standard_rank_cases import Outcome, Setting, check, run_all, run_steps
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from triton_cases import DEVICE

from kdecode.config import ConfigError, EngineConfig
from kdecode.engine.engine import LLM
from kdecode.engine.hardware import hardware
from kdecode.engine.preflight import check_devices
from kdecode.parallel import nccl
from kdecode.parallel.collectives import CollectiveExchange
from kdecode.parallel.nccl import NcclBlocks, NcclExchange
from kdecode.parallel.ranks import RankError, Ranks
from kdecode.testing.ranks import run_ranks

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for patch in PATCHES:
        monkeypatch.setattr(*patch)
    yield
    torch.set_num_threads(threads)


class Whole:
    """The watch of a group that is whole until somebody blames another."""

    def __init__(self) -> None:
        self.failure: RankError | None = None
        self.callbacks: list[Callable[[RankError], None]] = []

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def blame(self, error: BaseException) -> RankError:
        self.failure = RankError(0, f"of a group in this process: {error}")
        for callback in self.callbacks:
            callback(self.failure)
        return self.failure

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        self.callbacks.append(callback)


def _on_gpus(size: int, body: Callable[[Ranks, NcclExchange], Any]) -> list[Any]:
    """What ``body`` returns on each rank, a thread with a pretended GPU."""
    store = HashStore()

    def run(ranks: Ranks, _: object) -> Any:
        with pretend_cuda():
            exchange = nccl.exchange_between(store, ranks, "cuda:0", Whole(), 30.0)
            try:
                return body(ranks, exchange)
            finally:
                exchange.close()

    return run_ranks(size, run)


# In one hop and in two; sizes that divide among the ranks, and such that do not.
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 7168), (39, 7001), (0, 8)])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_added_in_the_order_of_the_ranks(size: int, shape: tuple[int, int]) -> None:
    def body(ranks: Ranks, exchange: NcclExchange) -> Tensor:
        found = exchange.reduce(rank_follow.part_of(ranks.rank, *shape).to("cuda"))
        assert isinstance(found, PretendTensor)
        exchange.settle()
        inner: Tensor = host(found)
        return inner

    expected = rank_follow.part_of(0, *shape)
    for rank in range(1, size):
        expected = expected + rank_follow.part_of(rank, *shape)
    for found in _on_gpus(size, body):
        assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_columns_are_gathered_and_parts_swapped(dtype: torch.dtype) -> None:
    size, rows = 3, 5

    def body(ranks: Ranks, exchange: NcclExchange) -> tuple[Tensor, Tensor]:
        columns = rank_follow.columns_of(ranks.rank, dtype, rows).to("cuda")
        pieces = rank_follow.pieces_of(ranks.rank, size).to("cuda")
        # Rows that do not lie behind one another.
        return host(exchange.gather(columns.T.contiguous().T)), host(exchange.swap(pieces))

    columns = torch.cat([rank_follow.columns_of(rank, dtype, rows) for rank in range(size)], 1)
    pieces = [rank_follow.pieces_of(rank, size) for rank in range(size)]
    for rank, (gathered, swapped) in enumerate(_on_gpus(size, body)):
        assert torch.equal(gathered, columns)
        assert torch.equal(swapped, torch.stack([given[rank] for given in pieces]))


def test_blocks_of_all_ranks_are_where_their_addresses_say() -> None:
    """Of one name they share their memory, the largest one's."""
    size = 3

    def body(ranks: Ranks, exchange: NcclExchange) -> list[Tensor]:
        blocks, found = NcclBlocks(exchange, ranks, "cuda:0"), []
        for num_bytes in (512, 1024, 256):
            block = blocks.block("attn", num_bytes)
            block.part.fill_(ranks.rank + num_bytes % 7)
            exchange.begin()
            block.run()
            exchange.settle()
            found += [_at(int(begin), num_bytes) for begin in host(block.sources)]
        return found

    for found in _on_gpus(size, body):
        values = [rank + num_bytes % 7 for num_bytes in (512, 1024, 256) for rank in range(size)]
        assert [part.unique().tolist() for part in found] == [[value] for value in values]
        assert [len(part) for part in found[::size]] == [512, 1024, 256]


def _at(address: int, num_bytes: int) -> Tensor:
    """A copy of what is in memory there."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, num_bytes)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("size", "setting"), [(2, Setting()), (4, Setting(interleave=1, cache_dtype="fp8"))]
)
def test_the_standard_forward_of_ranks_on_gpus(
    mini_16_checkpoint: Path, size: int, setting: Setting
) -> None:
    def body(ranks: Ranks, exchange: NcclExchange) -> Outcome:
        on_gpu = replace(setting, device="cuda")
        return on_host(run_steps(mini_16_checkpoint, on_gpu, ranks, exchange))

    found = _on_gpus(size, body)
    if setting.interleave is None:
        (whole,) = run_all(mini_16_checkpoint, 1, setting)
        check(found, whole)
        return
    # Pages of ranks that share positions hold other rows: compared with such ranks on the CPU.
    for ours, theirs in zip(found, run_all(mini_16_checkpoint, size, setting), strict=True):
        for logits, gold in zip(ours.logits, theirs.logits, strict=True):
            assert distance(logits, gold) < MAX_DISTANCE


def on_host(outcome: Outcome) -> Outcome:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [host(tensor) for tensor in value]
        return {layer: host(tensor) for layer, tensor in value.items()}

    names = ("logits", "prefixes", "conv", "recurrent", "pages")
    return replace(outcome, **{name: moved(getattr(outcome, name)) for name in names})


def _engine(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, fault: Fault | None = None, **settings: Any
) -> LLM:
    """Two ranks, each a process with a pretended GPU; this one is in `pretend_cuda`."""
    monkeypatch.setattr("kdecode.engine.leader.follow", partial(follow_on_gpu, fault))
    monkeypatch.setattr("kdecode.engine.preflight.check_devices", lambda engine: None)
    return build(checkpoint, "auto", 2, device="cuda", **settings)


@pytest.mark.parametrize("shared", [{}, pytest.param(sharing(2, 1), marks=pytest.mark.slow)])
def test_an_engine_on_gpus_says_what_one_rank_says(
    monkeypatch: pytest.MonkeyPatch, mini_16_checkpoint: Path, shared: dict[str, Any]
) -> None:
    single = Single.of(mini_16_checkpoint, "auto")
    with (
        pretend_cuda(),
        _engine(monkeypatch, mini_16_checkpoint, enable_prefix_caching=True, **shared) as llm,
    ):
        outputs = llm.generate(PROMPTS, greedy())
        logits = [llm.teacher_forced(*p) for p in zip(PROMPTS, single.replies, strict=True)]
        assert llm._worker.engine.device == "cuda:0"
        assert isinstance(llm._worker.packed.embed, PretendTensor)
        assert llm.resolved_config()["device"] == "cuda"
    assert single.near_ties(outputs) <= len(PROMPTS)
    for ours, theirs in zip(logits, single.logits, strict=True):
        assert distance(host(ours), theirs) < MAX_DISTANCE


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_on_its_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mini_16_checkpoint: Path, kind: str
) -> None:
    words = {"kill": "died with signal 9", "stop": "is stopped and has given no sign of life for"}
    stamp = tmp_path / "stamp"
    fault = Fault(1, kind, "decode", str(stamp))
    with pretend_cuda(), _engine(monkeypatch, mini_16_checkpoint, fault) as llm:
        outputs = llm.generate(PROMPTS, greedy())
        assert time.monotonic() - float(stamp.read_text()) < LIMIT_S
    for output in outputs:
        assert output.error is not None
        assert output.error.startswith("RankError: Rank 1 of 2 (process ")
        assert words[kind] in output.error


class Busy:
    """The event of a device that waits for another rank."""

    def record(self) -> None:
        """It never comes to it."""

    def query(self) -> bool:
        return False


def _exchange(watch: Whole) -> tuple[NcclExchange, PretendedNccl]:
    group = PretendedNccl(HashStore(), Ranks(0, 1), 1.0)
    return NcclExchange(group, Ranks(0, 1), watch, 0.05, "cuda:0"), group


def test_a_step_that_does_not_go_on_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, _ = _exchange(Whole())
    exchange.begin()
    with pretend_cuda():
        exchange.gather(torch.zeros(1, 1, device="cuda"))
    exchange.settle()
    assert exchange.number == 2
    # Between two steps any time may pass.
    time.sleep(0.15)
    exchange.begin()
    monkeypatch.setattr(torch.cuda, "Event", Busy)
    with pytest.raises(RankError, match=r"An exchange of cuda:0 did not end within 0\.05 s"):
        exchange.settle()
    exchange.close()


def test_the_end_of_a_step_asks_whether_the_group_is_whole() -> None:
    watch = Whole()
    exchange, group = _exchange(watch)
    exchange.settle()
    watch.failure = RankError(1, "of 2 died with signal 9")
    with pytest.raises(RankError, match="Rank 1 of 2 died with signal 9"):
        exchange.settle()
    exchange.abandon()
    until(lambda: group.is_aborted)
    exchange.close()


def test_a_group_that_breaks_in_the_first_exchange_gives_its_connections_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, made = Whole(), []

    def connect(store: Any, ranks: Ranks, device: str, timeout_s: float) -> PretendedNccl:
        made.append(PretendedNccl(store, ranks, timeout_s))
        return made[0]

    def first(self: NcclExchange, part: Tensor) -> Tensor:
        raise watch.blame(RuntimeError("It broke."))

    monkeypatch.setattr(nccl, "connect", connect)
    monkeypatch.setattr(NcclExchange, "gather", first)
    with pretend_cuda(), pytest.raises(RankError, match=r"It broke\."):
        nccl.exchange_between(HashStore(), Ranks(0, 1), "cuda:0", watch, 30.0)
    until(lambda: made[0].is_aborted)


def test_a_closed_exchange_moves_nothing() -> None:
    exchange, group = _exchange(Whole())
    exchange.close()
    assert group.is_aborted
    with pretend_cuda(), pytest.raises(RuntimeError, match="group of this exchange is closed"):
        exchange.gather(torch.zeros(1, 1, device="cuda"))


def test_parts_are_added_in_one_launch_where_triton_is() -> None:
    exchange, _ = _exchange(Whole())
    exchange._has_triton = True
    for shape in ((3, 1500), (3, 0)):
        parts = torch.stack([rank_follow.part_of(rank, 1, shape[1])[0] for rank in range(3)])
        found = exchange._added(parts.to(DEVICE))
        assert torch.equal(found.cpu(), CollectiveExchange._added(exchange, parts))
    exchange.close()


def test_every_rank_of_a_host_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(tensor_parallel_size=4, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(nccl, "refuse", list)
    words = "each of the 4 ranks on this host needs a GPU of its own, and torch finds 3"
    with pytest.raises(ConfigError, match=words):
        check_devices(engine)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_devices(engine)
    monkeypatch.setattr(nccl, "refuse", lambda: ["There is no NCCL."])
    with pytest.raises(ConfigError, match=r"There is no NCCL\."):
        check_devices(engine)
    check_devices(EngineConfig(tensor_parallel_size=4))


def test_torchrun_says_how_many_ranks_a_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(tensor_parallel_size=4, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nccl, "refuse", list)
    given = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is not set"):
        check_devices(engine)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_devices(engine)


def test_a_torch_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    (reason,) = nccl.refuse()
    assert f"torch {torch.__version__} here was built without" in reason


def test_each_rank_counts_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert hardware("cuda", 8) == {"name": "a GPU", "count": 8}
    assert hardware("cpu", 8)["count"] == 1
