"""Ranks with a pretended GPU each (`pretend_device.py`), and NCCL with gloo underneath.

What is on the pretended device lies on the CPU under the label "cuda:0", whichever GPU was asked
for. Imported by other processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from engine_faults import Fault, arm
from pretend_device import PretendTensor, pretend_cuda
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from kdecode.config import EngineConfig
from kdecode.engine.follower import follow
from kdecode.parallel import collectives, nccl
from kdecode.parallel.collectives import Watch
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import Ranks

_LOOK_S = 0.001


class PretendedNccl:
    """Moves what is on the pretended device, and nothing else, as NCCL does on a GPU.

    On an abort waits end, and nobody says that the values are not there.
    """

    def __init__(self, store: Store, ranks: Ranks, timeout_s: float) -> None:
        self._gloo: Any = collectives.connect(
            store, ranks, address="127.0.0.1", interface=None, timeout_s=timeout_s
        )
        self.is_aborted = False

    def _allgather_base(self, taken: Tensor, given: Tensor) -> _Work:
        given = _data(given).repeat(self._gloo.size())
        self._require_whole()
        return _Work(self._gloo.alltoall_base(_data(taken), given, [], []), self)

    def alltoall_base(self, taken: Tensor, given: Tensor, *sizes: list[int]) -> _Work:
        self._require_whole()
        return _Work(self._gloo.alltoall_base(_data(taken), _data(given), *sizes), self)

    def abort(self) -> None:
        self.is_aborted = True
        # Gloo, when its group is no longer referred to, waits for what is under way with a rank
        # that stands still; NCCL, once aborted, for nothing.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _require_whole(self) -> None:
        if self.is_aborted:
            raise RuntimeError("The communicator was aborted.")


class _Work:
    def __init__(self, work: Any, group: PretendedNccl) -> None:
        self._work, self._group = work, group

    def block_current_stream(self) -> None:
        """It blocks the host: this device does everything at once."""
        # Not gloo's own wait, which a rank that is stopped makes as long as its patience.
        while not self._group.is_aborted:
            if self._work.is_completed():
                self._work.wait()
                return
            time.sleep(_LOOK_S)


class DoneEvent:
    """Of a device that has always done what it was given."""

    def record(self) -> None:
        """There is nothing to mark."""

    def query(self) -> bool:
        return True


def _data(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, PretendTensor):
        raise RuntimeError("NCCL takes tensors of a GPU.")
    return tensor.inner


def _connect(store: Store, ranks: Ranks, device: str, timeout_s: float) -> PretendedNccl:
    return PretendedNccl(store, ranks, timeout_s)


def _made_here(watch: Watch, make: Callable[[], Any]) -> Any:
    """In this thread, which has the pretended device."""
    return make()


# What a process with a pretended GPU has instead: object, name, value.
PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (nccl, "connect", _connect),
    (nccl, "watched", _made_here),
    (torch.cuda, "Event", DoneEvent),
    (torch.cuda, "device", nullcontext),
    (torch.cuda, "set_device", lambda device: None),
    (torch.cuda, "is_available", lambda: False),
)


def follow_on_gpu(fault: Fault | None, group: Group, directory: Path, engine: EngineConfig) -> None:
    """A follower with a pretended GPU, and with a fault if there is one for it."""
    for patch in PATCHES:
        setattr(*patch)
    if fault is not None and fault.rank == group.ranks.rank:
        arm(fault)
    with pretend_cuda():
        follow(group, directory, engine)
