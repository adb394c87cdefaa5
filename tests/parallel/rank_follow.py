"""What follower processes of these tests do: what they are told, one operation at a time.

Imported by those processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from kdecode.parallel.group import Group


def follow(group: Group) -> None:
    group.tell_ready()
    while (operation := group.receive()) is not None:
        carry_out(group, *operation)


def carry_out(group: Group, name: str, *args: Any) -> None:
    """Every rank calls it with the same operation, whose ``rank`` is the one that it is about."""
    if name == "reduce":
        group.exchange.reduce(part_of(group.ranks.rank, *args))
    elif name == "fault":
        rank, fault, *rest = args
        if group.ranks.rank == rank:
            commit(fault, *rest)
    else:
        raise ValueError(f"There is no operation {name!r}.")


def commit(fault: str, after_s: float = 0.0) -> None:
    time.sleep(after_s)
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
