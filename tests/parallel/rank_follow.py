"""What follower processes of these tests do: what they are told, one operation at a time.

Imported by those processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from kdecode.kernels.common.native import Pool, detect_isa
from kdecode.kernels.exchange.native import reduce_step
from kdecode.parallel.group import Group
from kdecode.parallel.shared import exchange_error


def follow(group: Group) -> None:
    group.tell_ready()
    while (operation := group.receive()) is not None:
        carry_out(group, *operation)


def carry_out(group: Group, name: str, *args: Any) -> torch.Tensor | None:
    """Every rank calls it with the same operation. Returns what was exchanged last."""
    if name == "reduce":
        return group.exchange.reduce(part_of(group.ranks.rank, *args))
    if name == "gather":
        # Rows that do not lie behind one another.
        return group.exchange.gather(columns_of(group.ranks.rank, *args).T.contiguous().T)
    if name == "use the GPU":
        group.use_device(group.device_of("cuda"), *args)
        return None
    if name.endswith(" on the GPU"):
        return _carry_out_on_gpu(group, name.removesuffix(" on the GPU"), *args)
    if name == "swap":
        return group.exchange.swap(pieces_of(group.ranks.rank, group.ranks.size))
    if name == "fault":
        rank, fault = args
        if group.ranks.rank == rank:
            commit(fault)
    elif name == "fault while all exchange":
        rank, fault = args
        part = part_of(group.ranks.rank, 1, 64)
        for number in range(1_000_000):
            if group.ranks.rank == rank and number == 20:
                commit(fault)
            group.exchange.reduce(part)
    elif name == "fault while all exchange in memory":
        _exchange_in_memory(group, *args)
    elif name == "fault while others compute":
        # They are at the exchange long after it.
        rank, fault = args
        if group.ranks.rank == rank:
            commit(fault)
        time.sleep(1.0)
        group.exchange.reduce(part_of(group.ranks.rank, 1, 64))
    else:
        raise ValueError(f"There is no operation {name!r}.")
    return None


def _carry_out_on_gpu(group: Group, name: str, *args: Any) -> torch.Tensor | None:
    """Values of this rank's GPU; what is returned is on the host."""
    rank, device, exchange = group.ranks.rank, group.device_of("cuda"), group.exchange
    if name == "reduce":
        found = exchange.reduce(part_of(rank, *args).to(device))
    elif name == "gather":
        # Rows that do not lie behind one another.
        found = exchange.gather(columns_of(rank, *args).to(device).T.contiguous().T)
    elif name == "swap":
        pieces = pieces_of(rank, group.ranks.size).repeat(1, *args, 1)
        found = exchange.swap(pieces.to(device))
    elif name == "fault while all exchange":
        faulty, fault = args
        part = part_of(rank, 1, 64).to(device)
        for number in range(1_000_000):
            if rank == faulty and number == 5:
                commit(fault)
            group.begin()
            exchange.reduce(exchange.reduce(part).float())
            group.settle()
        return None
    elif name == "fault while all make a block":
        faulty, fault = args
        if rank == faulty:
            commit(fault)
        group.shared.block("late", 1024)
        return None
    elif name == "all but one exchange":
        group.begin()
        if rank == args[0]:
            return None
        exchange.reduce(part_of(rank, 1, 64).to(device))
        group.settle()
        return None
    else:
        raise ValueError(f"There is no operation {name!r} on a GPU.")
    group.settle()
    return found.cpu()


def _exchange_in_memory(group: Group, rank: int, fault: str) -> None:
    part = part_of(group.ranks.rank, 1, 64)
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    step = reduce_step(Pool(1), detect_isa(), group.shared, part, out)
    for number in range(1_000_000):
        if group.ranks.rank == rank and number == 20:
            commit(fault)
        step.run()
        if group.shared.failure is not None:
            raise group.blame(exchange_error(group.shared, "in a test"))


def commit(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ZeroDivisionError("as the drill wants it")


def part_of(rank: int, rows: int, columns: int) -> torch.Tensor:
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    part = torch.randn(rows, columns, generator=generator)
    return part * 10.0 ** torch.randint(-4, 5, (rows, columns), generator=generator)


def columns_of(rank: int, dtype: torch.dtype, rows: int) -> torch.Tensor:
    return (torch.arange(rows * 3).view(rows, 3) + 100 * rank).to(dtype)


def pieces_of(rank: int, size: int) -> torch.Tensor:
    return torch.arange(size * 6).view(size, 2, 3) + 100.0 * rank


def fail_while_building(group: Group) -> None:
    raise ValueError("no such share")


class Missing:
    """A follower's task that its process cannot make out."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_missing, ()

    def __call__(self, group: Group) -> None:
        raise AssertionError("It is never there.")


def _make_missing() -> Missing:
    raise ImportError("not in this process")
