"""Ranks as threads: what they exchange, and that a rank that fails or hangs ends all of them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from kdecode.parallel.ranks import Ranks
from kdecode.testing.ranks import RanksError, ThreadExchange, run_ranks


def test_parts_are_added_in_the_order_of_the_ranks_and_rounded_once() -> None:
    # In another order, or rounded on the way, the sums are others.
    parts = torch.tensor([[[1e8, 1.0]], [[1.0, 2**-9]], [[-1e8, 2**-9]], [[0.5, 0.0]]])

    def body(ranks: Ranks, exchange: ThreadExchange) -> Tensor:
        return exchange.reduce(parts[ranks.rank])

    expected = torch.tensor([[0.5, 1.0 + 2**-8]]).bfloat16()
    assert all(torch.equal(found, expected) for found in run_ranks(4, body))


def test_columns_come_in_the_order_of_the_ranks() -> None:
    def body(ranks: Ranks, exchange: ThreadExchange) -> list[Tensor]:
        given = [torch.full((2, 3), 10 * step + ranks.rank) for step in range(20)]
        return [exchange.gather(part) for part in given]

    for found in run_ranks(3, body):
        for step, columns in enumerate(found):
            assert (
                columns.tolist() == [[10 * step + rank for rank in (0, 0, 0, 1, 1, 1, 2, 2, 2)]] * 2
            )


def test_parts_for_each_other() -> None:
    def body(ranks: Ranks, exchange: ThreadExchange) -> Tensor:
        return exchange.swap(torch.tensor([10 * ranks.rank, 10 * ranks.rank + 1]).view(2, 1, 1))

    assert [found.flatten().tolist() for found in run_ranks(2, body)] == [[0, 10], [1, 11]]


def test_the_first_exception_ends_all_ranks() -> None:
    def body(ranks: Ranks, exchange: ThreadExchange) -> None:
        if ranks.rank == 2:
            raise KeyError("rank 2")
        exchange.gather(torch.zeros(1, 1))

    with pytest.raises(KeyError, match="rank 2"):
        run_ranks(4, body)


def test_a_rank_that_does_not_come_is_waited_for_so_long_only() -> None:
    end = threading.Event()

    def body(ranks: Ranks, exchange: ThreadExchange) -> None:
        if ranks.rank == 0:
            end.wait()
        exchange.gather(torch.zeros(1, 1))

    with pytest.raises(RanksError, match=r"Ranks \[0, 1\] of 2 did not end within 0.1 s"):
        run_ranks(2, body, timeout_s=0.1)
    end.set()


def test_ranks_that_exchange_different_things_are_told() -> None:
    def body(ranks: Ranks, exchange: ThreadExchange) -> None:
        exchange.gather(torch.zeros(1, 1 + ranks.rank))

    with pytest.raises(RanksError, match="different things at a time"):
        run_ranks(2, body)
