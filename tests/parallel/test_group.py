"""A group of processes on this host: values, operations in order, and an end without leftovers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_follow
import torch
from processes import is_there

from kdecode.parallel import launch
from kdecode.parallel.group import Group


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = launch.start(request.param, rank_follow.follow, part_bytes=4096)
    yield group
    group.close()


# Sums in one exchange and in two; sizes that divide among the ranks, and such that do not.
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 7168), (128, 7168), (99, 7001), (0, 8)])
def test_sums_are_added_in_the_order_of_the_ranks(group: Group, shape: tuple[int, int]) -> None:
    group.send(("reduce", *shape))
    found = group.exchange.reduce(rank_follow.part_of(0, *shape))
    parts = [rank_follow.part_of(rank, *shape) for rank in range(group.ranks.size)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_columns_are_gathered_in_the_order_of_the_ranks(
    group: Group, dtype: torch.dtype, rows: int
) -> None:
    group.send(("gather", dtype, rows))
    found = rank_follow.carry_out(group, "gather", dtype, rows)
    columns = [rank_follow.columns_of(rank, dtype, rows) for rank in range(group.ranks.size)]
    assert torch.equal(found, torch.cat(columns, 1))


def test_ranks_give_each_other_what_they_have_for_them(group: Group) -> None:
    group.send(("swap",))
    found = rank_follow.carry_out(group, "swap")
    given = [rank_follow.pieces_of(rank, group.ranks.size) for rank in range(group.ranks.size)]
    assert torch.equal(found, torch.stack([pieces[0] for pieces in given]))


def test_only_fp32_is_added(group: Group) -> None:
    with pytest.raises(ValueError, match=r"is torch\.bfloat16; it must be float32"):
        group.exchange.reduce(torch.zeros(1, 4, dtype=torch.bfloat16))


def test_a_group_has_nothing_that_could_be_left(group: Group) -> None:
    """Its memory and sockets have no names, so that whatever ends a process ends them."""
    for process in group.processes.values():
        there = Path(f"/proc/{process}")
        files = [os.readlink(path) for path in (there / "fd").iterdir()]
        files += [f"/{line.partition('/')[2]}" for line in (there / "maps").read_text().split("\n")]
        # The others are pytest's, which has removed their names.
        named = [file for file in files if not file.endswith("(deleted)")]
        made = [file for file in named if not file.startswith(sys.prefix)]
        assert not [file for file in made if file.startswith(("/dev/shm", "/tmp", "/run"))]


def test_a_closed_group_leaves_no_process() -> None:
    group = launch.start(2, rank_follow.follow)
    processes = group.processes.values()
    assert all(is_there(process) for process in processes)
    begin = time.monotonic()
    group.close()
    group.close()
    assert not any(is_there(process) for process in processes)
    assert time.monotonic() - begin < 4
