"""Signals between ranks, on one device and one rank after the other: what is waited for, how long,
and what is taken. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peers_here import blocks_here
from torch import Tensor
from triton_cases import DEVICE

from kdecode.config import environment
from kdecode.kernels.common.peer_table import GIVEN_UP, LATE, MOST_WAITING
from kdecode.kernels.common.triton_launch import ROW_BLOCKS
from kdecode.kernels.common.triton_peer_exchange import (
    give_launch,
    hand_on_launch,
    sum_launch,
    take_launch,
)

WORDS = 5000


class Ranks:
    """Ranks that exchange so many fp32 numbers in blocks of one name."""

    def __init__(self, size: int, name: str = "attn") -> None:
        self.size = size
        self.every = blocks_here(size, DEVICE)
        self.blocks = [each.block(name, 4 * WORDS) for each in self.every]
        self.counters = [torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(size)]

    def give(self, rank: int, numbers: Tensor) -> None:
        give_launch(numbers.to(DEVICE), self.blocks[rank], self.counters[rank]).run()

    def take(self, rank: int) -> Tensor:
        """[size, words]."""
        out = torch.full((self.size, WORDS), float("nan"), device=DEVICE)
        take_launch(self.blocks[rank], 0, WORDS, out.view(-1), 0, WORDS).run()
        return out.cpu()

    def late(self, rank: int) -> tuple[int, str] | None:
        return self.every[rank].late(self.every[rank].fault.tolist())


def part_of(rank: int, turn: int = 0) -> Tensor:
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    part = torch.randn(WORDS, generator=generator)
    return part * 10.0 ** torch.randint(-4, 5, (WORDS,), generator=generator)


def added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(torch.bfloat16)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_takes_what_all_have_given(size: int) -> None:
    """Turn after turn in the same memory."""
    ranks = Ranks(size)
    for turn in range(3):
        parts = [part_of(rank, turn) for rank in range(size)]
        for rank in range(size):
            ranks.give(rank, parts[rank])
        for rank in range(size):
            assert torch.equal(ranks.take(rank), torch.stack(parts))
            assert ranks.late(rank) is None
        assert [int(counter) for counter in ranks.counters] == [0] * size


def test_sums_have_the_order_of_the_ranks_and_are_handed_on() -> None:
    size, each = 3, -(-WORDS // 3)
    ranks, others = Ranks(size), []
    parts = [part_of(rank) for rank in range(size)]
    for rank in range(size):
        ranks.give(rank, parts[rank])
        others.append(ranks.every[rank].block("others", 2 * each))
    for rank in range(size):
        out = torch.empty(WORDS, dtype=torch.bfloat16, device=DEVICE)
        sum_launch(ranks.blocks[rank], 0, out).run()
        assert torch.equal(out.cpu(), added(parts))
        hand_on_launch(
            ranks.blocks[rank], rank * each, each, others[rank], ranks.counters[rank]
        ).run()
    for rank in range(size):
        # The last piece reaches beyond the end.
        out = torch.empty(WORDS, dtype=torch.bfloat16, device=DEVICE)
        take_launch(others[rank], 0, each, out, 0, each).run()
        assert torch.equal(out.cpu(), added(parts))


def test_a_wait_in_vain_ends_and_says_for_whom_and_for_what() -> None:
    ranks = Ranks(3, "attn")
    ranks.give(0, part_of(0))
    ranks.give(2, part_of(2))
    ranks.take(0)
    assert ranks.late(0) == (1, "attn")
    # Whoever waits later does not wait, and says nothing of ranks that it has not waited for.
    more = [each.block("experts", 4 * WORDS) for each in ranks.every]
    give_launch(part_of(0).to(DEVICE), more[0], ranks.counters[0]).run()
    out = torch.empty(3 * WORDS, device=DEVICE)
    take_launch(more[0], 0, WORDS, out, 0, WORDS).run()
    assert ranks.every[0].fault[LATE:].tolist() == [0, 1, 0]
    assert ranks.late(1) is None


def test_what_was_given_before_is_not_taken_for_what_is_given_now() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.give(rank, part_of(rank))
    for rank in range(2):
        ranks.take(rank)
        assert ranks.late(rank) is None
    ranks.give(0, part_of(0, 1))
    ranks.take(0)
    assert ranks.late(0) == (1, "attn")


def test_waits_that_are_given_up_name_nobody() -> None:
    ranks = Ranks(2)
    ranks.every[0].fault[GIVEN_UP] = 1
    ranks.give(0, part_of(0))
    ranks.take(0)
    assert ranks.late(0) is None


@pytest.mark.parametrize("is_last_wait", [True, False])
def test_what_is_made_behind_a_wait_in_vain_is_given_to_nobody(is_last_wait: bool) -> None:
    """By the launch that waits itself, or by later ones. The other rank, whose own waits were all
    in time, would take numbers that mean nothing for what it needs."""
    ranks, each = Ranks(2), -(-WORDS // 2)
    others = [every.block("others", 4 * WORDS) for every in ranks.every]
    ranks.give(1, part_of(1))
    if is_last_wait:
        hand_on_launch(ranks.blocks[1], each, each, others[1], ranks.counters[1]).run()
    else:
        ranks.take(1)
        give_launch(part_of(1).to(DEVICE), others[1], ranks.counters[1]).run()
    assert ranks.late(1) == (0, "attn")
    # What was given before is whole.
    ranks.give(0, part_of(0))
    assert torch.equal(ranks.take(0), torch.stack([part_of(rank) for rank in range(2)]))
    assert ranks.late(0) is None
    hand_on_launch(ranks.blocks[0], 0, each, others[0], ranks.counters[0]).run()
    out = torch.empty(WORDS, dtype=torch.bfloat16, device=DEVICE)
    take_launch(others[0], 0, each, out, 0, each).run()
    assert ranks.late(0) == (1, "others")


def test_a_rank_whose_waits_are_given_up_tells_nobody_that_it_has_made_something() -> None:
    ranks = Ranks(2)
    ranks.every[1].fault[GIVEN_UP] = 1
    for rank in range(2):
        ranks.give(rank, part_of(rank))
    ranks.take(0)
    assert ranks.late(0) == (1, "attn")
    assert [int(counter) for counter in ranks.counters] == [0, 0]


@pytest.mark.parametrize("last", [2**31 - 1, -1])
def test_counts_wrap(last: int) -> None:
    """Around the largest number, and through 0, with which the memory begins."""
    ranks = Ranks(2)
    for blocks in ranks.every:
        made: Any = blocks._made["attn"][1]
        shared, epoch = made
        epoch.fill_(last)
        shared.own[:8].view(torch.int32).fill_(last)
    parts = torch.stack([part_of(rank) for rank in range(2)])
    for rank in range(2):
        ranks.give(rank, parts[rank])
    for rank in range(2):
        assert torch.equal(ranks.take(rank), parts)
        assert ranks.late(rank) is None
    # The next one, which one rank does not come to.
    ranks.give(0, part_of(0, 1))
    ranks.take(0)
    assert ranks.late(0) == (1, "attn")


def test_blocks_of_one_name_share_their_memory() -> None:
    """The largest one's; a larger one is made anew, with flags of its own."""
    blocks, _ = blocks_here(2, DEVICE)
    large = blocks.block("attn", 1024)
    small = blocks.block("attn", 256)
    assert small.part.data_ptr() == large.part.data_ptr()
    assert small.part.numel() == 256
    assert large.peers is not None
    assert small.peers is large.peers
    assert blocks.block("attn", 2048).part.data_ptr() != large.part.data_ptr()


def test_a_block_that_is_outgrown_works_on() -> None:
    """Plans that were made with it have its addresses."""
    ranks = Ranks(2)
    behind: list[Any] = [each._made["attn"][1] for each in ranks.every]
    epochs = [weakref.ref(epoch) for _, epoch in behind]
    behind.clear()
    parts = torch.stack([part_of(rank) for rank in range(2)])
    larger = [each.block("attn", 8 * WORDS) for each in ranks.every]
    gc.collect()
    assert all(epoch() is not None for epoch in epochs)
    for rank in range(2):
        ranks.give(rank, parts[rank])
        give_launch(-parts[rank].to(DEVICE), larger[rank], ranks.counters[rank]).run()
    for rank in range(2):
        assert torch.equal(ranks.take(rank), parts)
        assert ranks.late(rank) is None


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What `compiled_peers.py` prints."""
    script = Path(__file__).with_name("compiled_peers.py")
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = environment().cache_dir / "compiled"
    command = [sys.executable, str(script), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=compiling)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_the_exchanges_of_the_standard_forward_compile_for_every_architecture(
    compiled: dict[str, Any],
) -> None:
    """And spill nothing."""
    assert set(compiled["taken"]) == {"sm_90", "sm_100", "sm_103"}
    for kernels in compiled["taken"].values():
        assert len(kernels) == 2 * 5
        assert {kernel["stack_bytes"] for kernel in kernels} == {0}


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_a_signal_is_a_store_and_nobody_waits_for_it(compiled: dict[str, Any], arch: str) -> None:
    """In a launch that waits for eight ranks, adds their parts and signals all of them."""
    code = compiled["code"][arch]
    ptx = re.sub(r"//.*", "", code["ptx"])
    atomics = re.findall(r"\b(?:atom|red)\.\S+", ptx)
    assert atomics
    assert not [atomic for atomic in atomics if ".sys" in atomic]
    assert ptx.count("st.release.sys") == 1
    # Atomic operations and stores at system scope: of the signal, and of a wait in vain.
    assert not re.search(r"\b(?:ATOM|RED)\S*\.SYS", code["machine"])
    assert len(re.findall(r"\bSTG\.\S*STRONG\.SYS", code["machine"])) == 3


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_one_thread_a_rank_polls_and_barriers_pass_the_order_on(
    compiled: dict[str, Any], arch: str
) -> None:
    code = compiled["code"][arch]
    ptx = re.sub(r"//.*", "", code["ptx"])
    poll, signal = ptx.index("ld.acquire.sys"), ptx.index("st.release.sys")
    # One place in the code each, which only the first eight threads come to.
    assert ptx.count("ld.acquire.sys") == 1
    # Beside the poll two looks whether waits are given up: of who waits, and of who signals.
    assert len(re.findall(r"\bLDG\.\S*STRONG\.SYS", code["machine"])) == 3
    for place in (poll, signal):
        guard = ptx[ptx.rindex("%tid.x", 0, place) : place]
        found = re.search(r"setp\.ge\.u32 \w+, peer, (%r\d+);\s+@\w+ bra done;", guard)
        assert found is not None
        assert re.findall(rf"mov\.\w+\s+{found[1]}, (\w+);", ptx) == ["8"]
    # Parts are read behind the barrier that is behind the poll, and never as what does not change.
    behind = ptx.index("bar", poll)
    reads = [found.start() for found in re.finditer(r"@%p\d+ ld\.global", ptx)]
    assert reads
    assert min(reads) > behind
    assert "ld.global.nc" not in ptx
    # Sums are stored, then come the arrival and two barriers around it, and then the signal.
    stored = ptx.rindex("st.global.b16", 0, signal)
    arrived = ptx.index("atom.", stored)
    assert "bar" in ptx[stored:arrived]
    assert "acq_rel" in ptx[arrived : ptx.index("\n", arrived)]
    # That includes what other programs wrote of waits in vain, for which it looks last of all.
    look = ptx.rindex("ld.relaxed.sys", 0, signal)
    assert "bar" in ptx[arrived:look]
    assert re.search(r"setp\.ne\.s32 p, seen, 0;\s+@p bra done;", ptx[look:signal])


def test_no_plan_has_more_programs_that_wait_for_others_than_a_gpu_has_room_for() -> None:
    """One a row, at most."""
    assert ROW_BLOCKS[-1] <= MOST_WAITING
