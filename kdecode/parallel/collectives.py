"""The exchange of the standard forward through torch.distributed, on one host or several.

Owns how `Exchange`'s functions are made of collectives that only move bytes: sums are added here,
in the order of the ranks, so that every rank has the same bits, whatever moves them. Values of the
host go over gloo, whose waits are bounded and end with the name of the rank at fault; those of GPUs
over NCCL (`nccl.py`), or need no collectives at all (`symmetric.py`). Does not know how the ranks
came to be.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from kdecode.parallel.exchange_table import one_hop_bytes
from kdecode.parallel.ranks import RankError, Ranks

Made = TypeVar("Made")

# How long a wait lasts before it looks whether the group is still whole.
_LOOK = timedelta(seconds=0.05)


class Watch(Protocol):
    """What an exchange asks about the group (`monitor.Monitor`)."""

    def check(self) -> None: ...

    def blame(self, error: BaseException) -> RankError: ...

    def on_failure(self, callback: Callable[[RankError], None]) -> None: ...


class Checks(Protocol):
    """Raises what ends a wait."""

    def check(self) -> None: ...


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


def watched(watch: Watch, make: Callable[[], Made]) -> Made:
    """What ``make`` returns; it cannot be interrupted, so that the group may break meanwhile.

    Raises RankError then, and where ``make`` fails.
    """
    try:
        return awaited(watch, make)
    except RankError:
        raise
    except Exception as error:
        raise watch.blame(error) from error


def awaited(watch: Checks, make: Callable[[], Made]) -> Made:
    """The same, and raises what ``make`` or ``watch`` raises; ``make`` is left to itself then."""
    made: list[Made] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            errors.append(error)
        is_over.set()

    threading.Thread(target=run, name="kdecode-connect", daemon=True).start()
    while not is_over.wait(_LOOK.total_seconds()):
        watch.check()
    if errors:
        raise errors[0]
    return made[0]


def wait_for_gpu(device: str, watch: Watch) -> None:
    """Returns when the GPU has done everything that it was given.

    Raises RankError where the group is broken, also where it broke meanwhile: what the GPU waited
    for has then been given up.
    """
    with torch.cuda.device(device):
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
    while not done.query():
        watch.check()
        # The threads that watch need the interpreter.
        time.sleep(0)
    watch.check()


class GroupExchange(ABC):
    """See `kernels.contract.Exchange`; how values are moved is a subclass's.

    number: exchanges that this rank has begun. patience_s: how long a rank is awaited that is
    alive.
    """

    transport: str

    def __init__(self, ranks: Ranks, watch: Watch, patience_s: float) -> None:
        self.number = 0
        self._ranks = ranks
        self._watch = watch
        self._patience_s = patience_s

    @abstractmethod
    def reduce(self, part: Tensor) -> Tensor: ...

    def gather(self, part: Tensor) -> Tensor:
        rows, columns = part.shape
        every = self._every(part).view(self._ranks.size, rows, columns)
        return every.transpose(0, 1).reshape(rows, self._ranks.size * columns)

    @abstractmethod
    def swap(self, parts: Tensor) -> Tensor: ...

    @abstractmethod
    def rewind(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Gives the connections back. Waits for what is under way."""

    @abstractmethod
    def abandon(self) -> None:
        """Gives up connections whose exchanges may never end."""

    @abstractmethod
    def _every(self, part: Tensor) -> Tensor:
        """[size, numbers]: of each rank its part."""

    def _is_one_hop(self, part: Tensor) -> bool:
        """Whether every rank is given all parts of a sum and adds them, which is one exchange of
        more bytes; else each adds one piece and gives its sum to the others, which is two. Raises
        ValueError for parts that are none."""
        if part.dtype != torch.float32:
            raise ValueError(f"A part of a sum is {part.dtype}; it must be float32.")
        return part.nbytes * self._ranks.size <= one_hop_bytes(self.transport)


class CollectiveExchange(GroupExchange):
    """Through the collectives of one of torch's groups, which only move bytes.

    patience_s: less than the group's own timeout.
    """

    def __init__(self, group: Any, ranks: Ranks, watch: Watch, patience_s: float) -> None:
        super().__init__(ranks, watch, patience_s)
        self._group: Any = group

    def reduce(self, part: Tensor) -> Tensor:
        if self._is_one_hop(part):
            return self._added(self._every(part)).view(part.shape)
        size, total = self._ranks.size, part.numel()
        piece = -(-total // size)
        # Pieces are equal, so that the last may reach beyond the end.
        pieces = torch.zeros(size, piece, device=part.device)
        pieces.view(-1)[:total] = part.reshape(-1)
        whole = self._every(self._added(self.swap(pieces)))
        return whole.view(-1)[:total].view(part.shape)

    def swap(self, parts: Tensor) -> Tensor:
        """Bytes are moved, whatever the numbers are."""
        parts = parts.contiguous()
        mine = torch.empty_like(parts)
        self._exchange("alltoall_base", _bytes_of(mine), _bytes_of(parts), [], [])
        return mine

    def rewind(self) -> None:
        """Collectives take the same way in every step."""

    def _added(self, parts: Tensor) -> Tensor:
        """[size, numbers] fp32, added in the order of the ranks, rounded once: bf16 [numbers]."""
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(torch.bfloat16)

    @abstractmethod
    def _wait(self, work: Any) -> None:
        """Until what was moved can be used. Raises RankError, and RuntimeError for an exchange that
        failed."""

    def _exchange(self, how: str, *given: Any) -> None:
        """Raises RankError with the rank at fault where another rank does not take part."""
        # First: what gives it up has broken the group before.
        group = self._group
        self._watch.check()
        if group is None:
            raise RuntimeError("The group of this exchange is closed.")
        self.number += 1
        try:
            self._wait(getattr(group, how)(*given))
        except RankError:
            raise
        except RuntimeError as error:
            raise self._watch.blame(error) from error


class GlooExchange(CollectiveExchange):
    """Of tensors on the host."""

    transport = "gloo"

    def close(self) -> None:
        self._group = None

    def abandon(self) -> None:
        """Leaves the connections to the end of the process, for exchanges that may never end.

        A rank on another host that stands still cannot be ended from here, and gloo, when its
        group is no longer referred to, waits for what is under way with it.
        """
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _every(self, part: Tensor) -> Tensor:
        """Handed from each to each: in one hop, where gloo's all-gather goes around the ranks."""
        return self.swap(part.reshape(1, -1).expand(self._ranks.size, -1))

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


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
