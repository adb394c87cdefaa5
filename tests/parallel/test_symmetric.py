"""Ranks whose GPUs read each other's memory, as far as it shows without one.

Each rank is a process with a pretended GPU; their memory is the host's, which all of them have
mapped, and the kernels that signal and wait run in Triton's interpreter, at the same time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_follow
import torch
from engine_faults import Fault
from pretend_device import pretend_cuda
from pretended_gpus import (
    PATCHES,
    SYMMETRIC_PATCHES,
    RefusedMemory,
    follow_on_gpu,
    follow_symmetric,
    follow_to_first_exchange,
    follow_with_refused_memory,
    follow_without_memory,
)
from ranked_engines import MAX_DISTANCE, build, distance, greedy
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from kdecode.config import ConfigError, EngineConfig
from kdecode.engine.engine import LLM
from kdecode.engine.preflight import check_devices
from kdecode.parallel import launch, nccl, symmetric
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import RankError
from kdecode.parallel.symmetric_memory import CountedFromZero

pytestmark = pytest.mark.interpreter
LIMIT_S = 60.0
PROMPT, TEXT = (11, 29, 3, 47, 5), (31, 8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has a pretended GPU, whose memory other ranks share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for patch in (*PATCHES, *SYMMETRIC_PATCHES):
        monkeypatch.setattr(*patch)
    with pretend_cuda():
        yield
    torch.set_num_threads(threads)


@contextmanager
def ranks(size: int, wanted: str = "symmetric", **settings: Any) -> Iterator[Group]:
    """Rank 0 of processes that share their memory."""
    follow = settings.pop("follow", follow_symmetric)
    group = launch.start(size, follow, settings.pop("args", ()), **settings)
    try:
        group.send(("use the GPU", wanted))
        rank_follow.carry_out(group, "use the GPU", wanted)
        yield group
    finally:
        group.close()


def carried_out(group: Group, *operation: Any) -> torch.Tensor | None:
    group.send(operation)
    return rank_follow.carry_out(group, *operation)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_what_they_exchange_over_gloo(gpu: None, size: int) -> None:
    """The same bits: in one hop and in two, in one turn of the memory's room and in several; sizes
    that divide among the ranks, and such that do not."""
    with ranks(size) as group:
        assert group.exchange.transport == "symmetric"
        for shape in ((1, 1), (3, 5), (2, 3001), (6, 3001), (0, 8)):
            found = carried_out(group, "reduce on the GPU", *shape)
            expected = rank_follow.part_of(0, *shape)
            for rank in range(1, size):
                expected = expected + rank_follow.part_of(rank, *shape)
            assert found is not None
            assert torch.equal(found, expected.to(torch.bfloat16)), shape
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            for rows in (5, 6000):
                found = carried_out(group, "gather on the GPU", dtype, rows)
                columns = [rank_follow.columns_of(rank, dtype, rows) for rank in range(size)]
                assert found is not None
                assert torch.equal(found, torch.cat(columns, dim=1)), (dtype, rows)
        for rows in (1, 1500):
            found = carried_out(group, "swap on the GPU", rows)
            given = [rank_follow.pieces_of(rank, size)[0] for rank in range(size)]
            assert found is not None
            assert torch.equal(found, torch.stack(given).repeat(1, rows, 1)), rows


@pytest.mark.parametrize(("fault", "words"), [("kill", "died with signal 9"), ("stop", "stopped")])
def test_a_rank_that_is_lost_while_others_wait_in_memory_is_named(
    gpu: None, fault: str, words: str
) -> None:
    with ranks(3, timeout_s=3.0) as group:
        begin = time.monotonic()
        with pytest.raises(RankError, match="Rank 1 of 3") as raised:
            carried_out(group, "fault while all exchange on the GPU", 1, fault)
        assert words in str(raised.value)
        assert time.monotonic() - begin < LIMIT_S


def test_a_rank_that_is_alive_and_does_not_come_is_named(gpu: None) -> None:
    """By the bound of the wait on the device: nothing else is wrong."""
    with ranks(3, timeout_s=1.0) as group, pytest.raises(RankError) as raised:
        carried_out(group, "all but one exchange on the GPU", 2)
    assert raised.value.rank == 2
    assert "did not come within 12 s while rank" in raised.value.what
    assert "waited for it in the exchange of values" in raised.value.what


def test_a_rank_that_is_lost_in_the_first_exchange_is_named(gpu: None) -> None:
    """Long before the bound of the wait, which the others are in."""
    begin = time.monotonic()
    with (
        pytest.raises(RankError, match=r"Rank 1 of 3 .* died with signal 9"),
        ranks(3, follow=follow_to_first_exchange, args=(1, "kill"), timeout_s=5.0),
    ):
        pass
    assert time.monotonic() - begin < LIMIT_S


def test_a_rank_that_does_not_come_to_the_first_exchange_is_named(gpu: None) -> None:
    with (
        pytest.raises(
            RankError, match=r"Rank 2 of 3 \(process \d+\) did not come within 12 s while rank"
        ),
        ranks(3, follow=follow_to_first_exchange, args=(2, "away"), timeout_s=1.0),
    ):
        pass


@pytest.mark.parametrize(("fault", "words"), [("kill", "died with signal 9"), ("stop", "stopped")])
def test_a_rank_that_is_lost_while_others_make_a_block_is_named(
    gpu: None, fault: str, words: str
) -> None:
    with ranks(3, timeout_s=3.0) as group:
        begin = time.monotonic()
        with pytest.raises(RankError, match=f"Rank 1 of 3.*{words}"):
            carried_out(group, "fault while all make a block on the GPU", 1, fault)
        assert time.monotonic() - begin < LIMIT_S


@pytest.mark.parametrize("is_leader", [False, True])
def test_nccl_is_taken_where_the_memory_of_a_rank_turns_out_not_to_be_shared(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_leader: bool
) -> None:
    """Also by the ranks that wait for it."""
    follow = follow_symmetric if is_leader else follow_with_refused_memory
    if is_leader:
        monkeypatch.setattr(symmetric, "TorchMemory", RefusedMemory)
    reason = f"rank {0 if is_leader else 1} cannot share memory: RuntimeError: The driver does not"
    with ranks(2, "auto", follow=follow) as group:
        assert group.exchange.transport == group.shared.transport == "nccl"
        assert carried_out(group, "reduce on the GPU", 3, 5) is not None
    assert f"the GPUs exchange values through NCCL: {reason}" in caplog.text
    with pytest.raises(ConfigError, match=reason), ranks(2, follow=follow):
        pass


def test_nccl_is_taken_where_a_rank_cannot_read_the_memory_of_others(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with ranks(2, "auto", follow=follow_without_memory) as group:
        assert group.exchange.transport == group.shared.transport == "nccl"
        found = carried_out(group, "reduce on the GPU", 3, 5)
        expected = rank_follow.part_of(0, 3, 5) + rank_follow.part_of(1, 3, 5)
        assert found is not None
        assert torch.equal(found, expected.to(torch.bfloat16))
    with (
        pytest.raises(ConfigError, match="rank 1 has no such memory"),
        ranks(2, follow=follow_without_memory),
    ):
        pass
    monkeypatch.setattr(symmetric, "refuse", lambda devices, is_one_host: ["There is none."])
    with pytest.raises(ConfigError, match=r"There is none\."), ranks(2):
        pass
    with ranks(2, "auto") as group:
        assert group.exchange.transport == "nccl"
    assert "the GPUs exchange values through NCCL: There is none." in caplog.text


@pytest.fixture
def gold(mini_16_checkpoint: Path) -> torch.Tensor:
    """One rank's logits behind PROMPT and TEXT, on the CPU: asked for before the GPU."""
    return build(mini_16_checkpoint, "auto").teacher_forced(PROMPT, TEXT)


def _engine(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, fault: Fault | None = None) -> LLM:
    monkeypatch.setattr("kdecode.engine.leader.follow", partial(follow_on_gpu, fault))
    monkeypatch.setattr("kdecode.engine.preflight.check_devices", lambda engine: None)
    return build(checkpoint, "auto", 2, device="cuda", gpu_exchange="symmetric")


def test_an_engine_that_shares_memory_says_what_one_rank_says(
    gold: torch.Tensor, gpu: None, monkeypatch: pytest.MonkeyPatch, mini_16_checkpoint: Path
) -> None:
    with _engine(monkeypatch, mini_16_checkpoint) as llm:
        assert llm.resolved_config()["gpu_exchange"] == "symmetric"
        (output,) = llm.generate([PROMPT], greedy(2))
        logits = llm.teacher_forced(PROMPT, TEXT)
    assert output.error is None
    assert len(output.token_ids) == 2
    assert distance(logits.cpu(), gold) < MAX_DISTANCE


def test_a_rank_that_is_lost_in_a_step_is_named(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mini_16_checkpoint: Path
) -> None:
    stamp = tmp_path / "stamp"
    fault = Fault(1, "kill", "decode", str(stamp))
    with _engine(monkeypatch, mini_16_checkpoint, fault) as llm:
        outputs = llm.generate([PROMPT, TEXT], greedy(4))
        assert time.monotonic() - float(stamp.read_text()) < LIMIT_S
    for output in outputs:
        assert output.error is not None
        assert output.error.startswith("RankError: Rank 1 of 2 (process ")
        assert "died with signal 9" in output.error


def test_the_reasons_against_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("no symmetric memory of CUDA" in reason for reason in _refused())
    monkeypatch.setattr(symmetric, "_is_in_torch", lambda: True)
    monkeypatch.setattr(symmetric, "_multiprocessors", lambda device: 65)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(symmetric, "_has_atomics", lambda one, other: True)
    assert _refused() == []
    (reason,) = symmetric.refuse(range(4), is_one_host=False)
    assert "the ranks are on several; set gpu_exchange to 'nccl'" in reason
    (reason,) = symmetric.refuse(range(33), is_one_host=True)
    assert "up to 32 ranks; there are 33" in reason
    monkeypatch.setattr(symmetric, "find_spec", lambda name: None)
    (reason,) = _refused()
    assert "Triton is not installed here" in reason
    monkeypatch.undo()
    monkeypatch.setattr(symmetric, "_is_in_torch", lambda: True)
    monkeypatch.setattr(symmetric, "_multiprocessors", lambda device: 65)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one + other != 4)
    (reason,) = _refused()
    assert "cuda:1 cannot read the memory of cuda:3" in reason
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    (reason,) = _refused()
    assert "atomic operations of cuda:2 do not reach the memory of cuda:1" in reason
    monkeypatch.setattr(symmetric, "_has_atomics", lambda one, other: True)
    monkeypatch.setattr(symmetric, "_multiprocessors", lambda device: 65 - device // 3)
    (reason,) = _refused()
    assert "more than 64 multiprocessors" in reason
    assert "cuda:3 has 64 for this process" in reason


class FakeDriver:
    """CUDA's, of four GPUs of which one reaches another with loads and stores only."""

    def cuDeviceGetP2PAttribute(self, found: Any, attribute: int, one: int, other: int) -> int:  # noqa: N802
        assert attribute == 3
        found._obj.value = int((one, other) != (2, 1))
        return 0


def _refused() -> list[str]:
    return symmetric.refuse(range(4), is_one_host=True)


def test_who_asks_for_symmetric_memory_is_told_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(nccl, "refuse", list)
    monkeypatch.setattr(symmetric, "refuse", lambda devices, is_one_host: ["There is none."])
    shape = {"tensor_parallel_size": 4, "device": "cuda"}
    check_devices(EngineConfig(**shape))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"There is none\."):
        check_devices(EngineConfig(**shape, gpu_exchange="symmetric"))  # type: ignore[arg-type]
    # Who asks for the one does not need the other.
    monkeypatch.setattr(nccl, "refuse", lambda: ["There is no NCCL."])
    monkeypatch.setattr(symmetric, "refuse", lambda devices, is_one_host: [])
    check_devices(EngineConfig(**shape, gpu_exchange="symmetric"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"There is no NCCL\."):
        check_devices(EngineConfig(**shape, gpu_exchange="nccl"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_exchange": "gloo"}, "gpu_exchange is 'gloo'"),
        ({"gpu_exchange": "nccl"}, "how the GPUs of several ranks exchange values"),
        ({"gpu_exchange": "symmetric", "device": "cuda"}, "tensor_parallel_size 1"),
        ({"gpu_exchange": "nccl", "tensor_parallel_size": 2}, "device 'cpu'"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


def test_a_process_that_had_a_group_before_meets_others_at_zero() -> None:
    """torch counts its meetings through a process, and looks for the others under that number."""
    shared = HashStore()
    numbers = (0, 7)
    # As torch uses a store: from C++.
    stores = [CountedFromZero(shared, lambda: None, 1.0) for _ in numbers]
    for turn in range(2):
        ends = [
            PrefixStore(f"CUDASymmetricMemory/{number + turn}", store)
            for number, store in zip(numbers, stores, strict=True)
        ]
        for rank, end in enumerate(ends):
            end.set(str(rank), f"turn {turn} of {rank}")
        for end in ends:
            assert end.get("0") == f"turn {turn} of 0".encode()
            assert end.multi_get(["0", "1"])[1] == f"turn {turn} of 1".encode()
        assert [end.add("count", 1) for end in ends] == [1, 2]
        for end in ends:
            end.wait(["count"])
            assert end.check(["count"])


def test_a_rank_that_is_alive_is_awaited_for_longer_than_the_store_would() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.01))
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 50:
            store.set("memory/late", "It came.")

    # As torch uses a store: from C++.
    assert PrefixStore("memory", CountedFromZero(store, check, 1.0)).get("late") == b"It came."


def test_a_meeting_ends_with_the_group() -> None:
    def check() -> None:
        raise RankError(1, "of 2 died with signal 9")

    counted = CountedFromZero(HashStore(), check, 1.0)
    store = PrefixStore("memory", counted)
    for wait in (lambda: store.get("late"), lambda: store.wait(["late"])):
        with pytest.raises(RankError, match="Rank 1 of 2 died with signal 9"):
            wait()
    with pytest.raises(TimeoutError, match="did not come within"):
        CountedFromZero(HashStore(), lambda: None, 1.0).wait(["late"], timedelta(seconds=0.01))
