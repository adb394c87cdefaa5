"""Rank 0 of a group as a program: size, timeout, and what it does once the others are ready."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time

import rank_follow
import torch

from kdecode.parallel import launch
from kdecode.parallel.group import Group


def main(size: int, timeout_s: float, doing: str) -> None:
    group = launch.start(size, rank_follow.follow, timeout_s=timeout_s)
    group.wait_until_ready()
    print(json.dumps(list(group.processes.values())), flush=True)
    if doing == "sums":
        _check_sums(group)
        group.close()
        print(f"the sums are right on {group.num_hosts} hosts")
    if doing == "exchanges":
        while True:
            _exchange(group)
    if doing == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if doing == "raises":
        group.send(("fault while all exchange", -1, "none"))
        raise ArithmeticError("of rank 0")
    if doing == "catches an interrupt":
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            _exchange(group)
            group.close()
            print("interrupted, and exchanged once more")
    while doing == "nothing":
        group.check()
        time.sleep(0.05)


def _check_sums(group: Group) -> None:
    for shape in ((1, 3), (5, 1024)):
        group.send(("reduce", *shape))
        found = group.exchange.reduce(rank_follow.part_of(0, *shape))
        parts = [rank_follow.part_of(rank, *shape) for rank in range(group.ranks.size)]
        assert torch.equal(found, functools.reduce(torch.add, parts).to(torch.bfloat16))


def _exchange(group: Group) -> None:
    group.send(("reduce", 1, 64))
    rank_follow.carry_out(group, "reduce", 1, 64)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
