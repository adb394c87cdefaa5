"""The exchange of the standard forward: torch.distributed's gloo, on one host or several.

Owns how `Exchange`'s functions are made of gloo's collectives, and that a wait for the other
ranks is bounded and ends with the name of the one at fault. gloo only moves bytes: sums are added
here, in the order of the ranks, so that every rank has the same bits. Does not know how the ranks
came to be.
"""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from kdecode.parallel.ranks import RankError, Ranks

# How long a wait lasts before it looks whether the group is still whole.
_LOOK = timedelta(seconds=0.05)
# What a rank hands out at most to add in one exchange: above it, bytes take longer than a hop.
_FEW_BYTES = 2 << 20


class Watch(Protocol):
    """What an exchange asks about the group (`monitor.Monitor`)."""

    def check(self) -> None: ...

    def blame(self, error: BaseException) -> RankError: ...


def connect(
    store: Store, ranks: Ranks, *, address: str, interface: str | None, timeout_s: float
) -> ProcessGroupGloo:
    """gloo's connections among all ranks; every rank calls it. Raises RuntimeError.

    Not torch's default group, which belongs to the process that embeds the engine. address: of this
    host, at which the others reach it; interface: the network interface instead.
    """
    # torch's own stub has other names than the class.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    where = {"hostname": address} if interface is None else {"interface": interface}
    options._devices = [ProcessGroupGloo.create_device(**where)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return ProcessGroupGloo(store, ranks.rank, ranks.size, options)


class GlooExchange:
    """See `kernels.contract.Exchange`.

    number: exchanges that this rank has begun. patience_s: how long a rank is awaited that is
    alive; less than the group's own timeout.
    """

    def __init__(
        self, group: ProcessGroupGloo, ranks: Ranks, watch: Watch, patience_s: float
    ) -> None:
        self.number = 0
        self._group: ProcessGroupGloo | None = group
        self._ranks = ranks
        self._watch = watch
        self._patience_s = patience_s

    def reduce(self, part: Tensor) -> Tensor:
        """Of few numbers every rank is given all and adds them, which is one exchange; of many each
        rank adds one piece and gives its sum to the others, which is two of fewer bytes."""
        if part.dtype != torch.float32:
            raise ValueError(f"A part of a sum is {part.dtype}; it must be float32.")
        if part.nbytes * self._ranks.size <= _FEW_BYTES:
            return _added(self._every(part)).view(part.shape)
        size, total = self._ranks.size, part.numel()
        piece = -(-total // size)
        # Pieces are equal, so that the last may reach beyond the end.
        pieces = torch.zeros(size, piece)
        pieces.view(-1)[:total] = part.reshape(-1)
        whole = self._every(_added(self.swap(pieces)))
        return whole.view(-1)[:total].view(part.shape)

    def gather(self, part: Tensor) -> Tensor:
        rows, columns = part.shape
        every = self._every(part).view(self._ranks.size, rows, columns)
        return every.transpose(0, 1).reshape(rows, self._ranks.size * columns)

    def swap(self, parts: Tensor) -> Tensor:
        """Bytes are moved, whatever the numbers are."""
        parts = parts.contiguous()
        mine = torch.empty_like(parts)
        given, taken = (tensor.view(-1).view(torch.uint8) for tensor in (parts, mine))
        self._exchange(taken, given)
        return mine

    def _every(self, part: Tensor) -> Tensor:
        """[size, numbers]: of each rank its part, handed from each to each.

        In one hop, where gloo's all-gather goes around the ranks one by one.
        """
        return self.swap(part.reshape(1, -1).expand(self._ranks.size, -1))

    def close(self) -> None:
        """Gives the connections back. Waits for what is under way."""
        self._group = None

    def abandon(self) -> None:
        """Leaves the connections to the end of the process, for exchanges that may never end.

        A rank on another host that stands still cannot be ended from here, and gloo, when its
        group is no longer referred to, waits for what is under way with it.
        """
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _exchange(self, taken: Tensor, given: Tensor) -> None:
        """Raises RankError with the rank at fault where another rank does not take part."""
        self._watch.check()
        if self._group is None:
            raise RuntimeError("The group of this exchange is closed.")
        self.number += 1
        group: Any = self._group
        work = group.alltoall_base(taken, given, [], [])
        try:
            self._wait(work)
        except RankError:
            raise
        except RuntimeError as error:
            raise self._watch.blame(error) from error

    def _wait(self, work: Any) -> None:
        begin = time.monotonic()
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                # Either it took longer, or this is its own error, which a second wait tells.
                if work.is_completed():
                    work.wait()
                    return
            self._watch.check()
            if time.monotonic() - begin > self._patience_s:
                raise RuntimeError(f"The others did not come within {self._patience_s:g} s.")


def _added(parts: Tensor) -> Tensor:
    """[numbers] bf16: the sum of [size, numbers] fp32 in the order of the ranks, rounded once."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(torch.bfloat16)
