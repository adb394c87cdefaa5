"""What the tests of the shared exchange run in processes of their own."""

from __future__ import annotations

import time
from multiprocessing.synchronize import Event

import torch

from kdecode.kernels.common.native import Pool, SharedExchange, detect_isa
from kdecode.kernels.exchange.native import reduce_step
from kdecode.parallel.ranks import Ranks
from kdecode.parallel.shared import join

WIDTH = 700


def make_part(rank: int, number: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(rows, WIDTH, generator=generator)


def make_sum(size: int, number: int, rows: int) -> torch.Tensor:
    """In the order of the ranks, rounded once."""
    total = make_part(0, number, rows)
    for rank in range(1, size):
        total = total + make_part(rank, number, rows)
    return total.bfloat16()


def reduce_many(shared: SharedExchange, pool: Pool, isa: str, count: int) -> None:
    """Exchanges of changing values and sizes, each against its sum."""
    for number in range(count):
        rows = 1 + number * 7 % 5
        out = torch.full((rows, WIDTH), float("nan"), dtype=torch.bfloat16)
        reduce_step(pool, isa, shared, make_part(shared.rank, number, rows), out).run()
        assert torch.equal(out, make_sum(shared.size, number, rows)), f"exchange {number}"


def reduce_in_process(path: str, part_bytes: int, ranks: Ranks, count: int) -> None:
    shared = join(path, part_bytes, ranks, num_threads=1, timeout_s=5.0)
    reduce_many(shared, Pool(1), detect_isa(), count)


def stand_by(path: str, part_bytes: int, joined: Event) -> None:
    shared = join(path, part_bytes, Ranks(1, 2), num_threads=1, timeout_s=5.0)
    joined.set()
    time.sleep(60)
    assert shared.failure is None
