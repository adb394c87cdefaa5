"""Ranks as threads of one process: what is divided is tested without processes.

Owns the threads, the exchange between them, and that no test waits for ever: the first rank that
fails ends all of them, and a rank that does not come to an exchange is waited for so long only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kdecode.parallel.ranks import Ranks

_Result = TypeVar("_Result")
TIMEOUT_S = 60.0


class RanksError(RuntimeError):
    """Ranks that did not end, or that did not make the same exchanges."""


@dataclass(frozen=True)
class ThreadExchange:
    """An `Exchange` of one of the threads that `run_ranks` starts."""

    ranks: Ranks
    meeting: _Meeting

    def reduce(self, part: Tensor) -> Tensor:
        parts = self.meeting.exchange(self.ranks.rank, "reduce", part)
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        return total.to(torch.bfloat16)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.ranks.rank, "gather", part), dim=-1)

    def swap(self, parts: Tensor) -> Tensor:
        every = self.meeting.exchange(self.ranks.rank, "swap", parts)
        return torch.stack([given[self.ranks.rank] for given in every])

    def rewind(self) -> None:
        """Every exchange has the same place."""


class _Meeting:
    """Where all ranks leave what they give, and take what the others have left."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._given: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size

    def exchange(self, rank: int, kind: str, part: Tensor) -> list[Tensor]:
        """Every rank's part, in order. Raises RanksError where they are not of one kind."""
        self._given[rank] = kind, part
        self._barrier.wait()
        given = list(self._given)
        # Nobody leaves the next part before all have taken these.
        self._barrier.wait()
        forms = {(kind, part.shape, part.dtype) for kind, part in given}
        if len(forms) > 1:
            raise RanksError(f"The ranks exchange different things at a time: {sorted(forms)}.")
        return [part for _, part in given]

    def abort(self) -> None:
        self._barrier.abort()


def run_ranks(
    size: int,
    body: Callable[[Ranks, ThreadExchange], _Result],
    timeout_s: float = TIMEOUT_S,
) -> list[_Result]:
    """What ``body`` returns on each of ``size`` ranks, in order.

    Raises the first exception of any of them. timeout_s: for one exchange, and for all ranks to end
    once the first has.
    """
    meeting = _Meeting(size, timeout_s)
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run(ranks: Ranks) -> None:
        try:
            results[ranks.rank] = body(ranks, ThreadExchange(ranks, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.abort()
        finally:
            is_over.set()

    threads = [
        threading.Thread(target=run, args=(Ranks(rank, size),), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    is_over.wait()
    for thread in threads:
        thread.join(timeout_s)
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if causes:
        raise causes[0]
    missing = [rank for rank in range(size) if rank not in results]
    if missing:
        raise RanksError(f"Ranks {missing} of {size} did not end within {timeout_s:g} s.")
    return [results[rank] for rank in range(size)]
