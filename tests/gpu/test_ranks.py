"""Two ranks, a GPU each: what they exchange, what they say, and who is named when one is lost; with
NCCL between them, and with memory that both read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_follow
import torch
from engine_faults import Fault, follow_until
from ranked_engines import MAX_DISTANCE, PROMPTS, Single, build, distance, greedy, sharing

from kdecode.parallel import launch
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import RankError

pytestmark = pytest.mark.gpu(2)

WORDS = {"kill": "died with signal 9", "stop": "is stopped and has given no sign of life for"}
LIMIT_S = 60.0
TRANSPORTS = ("nccl", "symmetric")


@contextmanager
def ranks(transport: str, **settings: Any) -> Iterator[Group]:
    group = launch.start(2, rank_follow.follow, **settings)
    try:
        carried_out(group, "use the GPU", transport)
        yield group
    finally:
        group.close()


def carried_out(group: Group, *operation: Any) -> torch.Tensor | None:
    group.send(operation)
    return rank_follow.carry_out(group, *operation)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_exchange_what_they_exchange_over_gloo(transport: str) -> None:
    """In one hop and in two: the bits that they have on the host."""
    with ranks(transport) as group:
        assert group.exchange.transport == transport
        for shape in ((1, 1), (3, 5), (16, 7168), (99, 7001), (3000, 7168)):
            found = carried_out(group, "reduce on the GPU", *shape)
            expected = rank_follow.part_of(0, *shape) + rank_follow.part_of(1, *shape)
            assert found is not None
            assert torch.equal(found, expected.to(torch.bfloat16)), shape
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            found = carried_out(group, "gather on the GPU", dtype, 5)
            columns = [rank_follow.columns_of(rank, dtype, 5) for rank in range(2)]
            assert found is not None
            assert torch.equal(found, torch.cat(columns, dim=1)), dtype
        found = carried_out(group, "swap on the GPU", 7)
        given = [rank_follow.pieces_of(rank, 2)[0] for rank in range(2)]
        assert found is not None
        assert torch.equal(found, torch.stack(given).repeat(1, 7, 1))


def test_groups_of_one_process_follow_each_other() -> None:
    """Of which the second one's followers are new."""
    for _ in range(2):
        with ranks("symmetric") as group:
            assert carried_out(group, "reduce on the GPU", 3, 5) is not None


def test_a_rank_that_is_alive_and_does_not_come_is_named() -> None:
    """By the bound of the wait on the device."""
    with ranks("symmetric", timeout_s=0.5) as group, pytest.raises(RankError) as raised:
        carried_out(group, "all but one exchange on the GPU", 1)
    assert raised.value.rank == 1
    assert "did not come within 6 s while rank 0 waited" in raised.value.what


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("backend", "shared"), [("auto", {}), ("auto", sharing(2, 1)), ("latency_specialized", {})]
)
def test_ranks_on_gpus_say_what_one_rank_says(
    mini_16_checkpoint: Path, backend: str, shared: dict[str, object], transport: str
) -> None:
    single = Single.of(mini_16_checkpoint, "auto")
    settings = {"device": "cuda", "gpu_exchange": transport, **shared}
    with build(mini_16_checkpoint, backend, 2, **settings) as llm:
        assert llm.resolved_config()["gpu_exchange"] == transport
        outputs = llm.generate(PROMPTS, greedy())
        logits = [llm.teacher_forced(*p) for p in zip(PROMPTS, single.replies, strict=True)]
    assert single.near_ties(outputs) <= len(PROMPTS)
    for ours, theirs in zip(logits, single.logits, strict=True):
        assert distance(ours.cpu(), theirs) < MAX_DISTANCE


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_rank_that_is_lost_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mini_16_checkpoint: Path,
    kind: str,
    phase: str,
    backend: str,
    transport: str,
) -> None:
    stamp = tmp_path / "stamp"
    fault = Fault(1, kind, phase, str(stamp))
    monkeypatch.setattr("kdecode.engine.leader.follow", partial(follow_until, fault))
    settings = {"device": "cuda", "gpu_exchange": transport}
    with build(mini_16_checkpoint, backend, 2, **settings) as llm:
        outputs = llm.generate(PROMPTS, greedy())
        assert time.monotonic() - float(stamp.read_text()) < LIMIT_S
    for output in outputs:
        assert output.error is not None
        assert output.error.startswith("RankError: Rank 1 of 2 (process ")
        assert WORDS[kind] in output.error
