"""Ranks with a pretended GPU each (`pretend_device.py`): NCCL with gloo underneath, or memory that
all of them have mapped, with kernels in Triton's interpreter.

What is on the pretended device lies on the CPU under the label "cuda:0", whichever GPU was asked
for. Imported by other processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rank_follow
import torch
from engine_faults import Fault, arm
from pretend_device import PretendTensor, pretend_cuda
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from triton_interpreter import round_in_the_interpreter

from kdecode.config import EngineConfig
from kdecode.engine.follower import follow
from kdecode.kernels.common.triton_launch import Launch
from kdecode.parallel import collectives, nccl, symmetric
from kdecode.parallel.collectives import Checks, Watch, awaited, watched
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import Ranks
from kdecode.parallel.symmetric_memory import SharedMemory, TorchMemory

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


def _watched(watch: Watch, make: Callable[[], Any]) -> Any:
    """In a thread that has the pretended device, too."""
    return watched(watch, partial(_pretending, make))


def _awaited(watch: Checks, make: Callable[[], Any]) -> Any:
    return awaited(watch, partial(_pretending, make))


def _pretending(make: Callable[[], Any]) -> Any:
    with pretend_cuda():
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


class PretendedMemory:
    """Memory of the host that the processes of all ranks have mapped, in the place of symmetric
    memory. It is one rank's, and on the pretended device if ``device`` is."""

    def __init__(self, store: Store, ranks: Ranks, device: str) -> None:
        self._store, self._ranks = store, ranks
        self._is_pretended = device != "cpu"
        self._number = 0

    def take(self, num_bytes: int) -> SharedMemory:
        number, self._number = self._number, self._number + 1
        file = os.memfd_create("kdecode-pretended", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        self._store.set(f"take {number} of {self._ranks.rank}", f"/proc/{os.getpid()}/fd/{file}")
        every = []
        for rank in range(self._ranks.size):
            path = self._store.get(f"take {number} of {rank}").decode()
            with open(path, "r+b", buffering=0) as opened:
                memory = mmap.mmap(opened.fileno(), num_bytes)
            every.append(torch.frombuffer(memory, dtype=torch.uint8))
        own = every[self._ranks.rank]
        # Open for as long as others may look for it.
        alive = (every, file)
        addresses = [data.data_ptr() for data in every]
        return SharedMemory(PretendTensor(own) if self._is_pretended else own, addresses, alive)


def _run_on_the_host(launch: Launch) -> None:
    """In Triton's interpreter, with the data of tensors of the pretended device."""
    arguments = {name: _inner(value) for name, value in launch.arguments.items()}
    run_launch(replace(launch, arguments=arguments))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PretendTensor) else value


def _abandon(exchange: symmetric.SymmetricExchange) -> None:
    """Also in a thread that has no pretended device."""
    with pretend_cuda():
        abandon(exchange)


run_launch, abandon = Launch.run, symmetric.SymmetricExchange.abandon

# What a process with a pretended GPU has beside them, whose memory all ranks share.
SYMMETRIC_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (symmetric, "TorchMemory", PretendedMemory),
    (symmetric, "refuse", lambda devices, is_one_host: []),
    (symmetric, "watched", _watched),
    (symmetric, "awaited", _awaited),
    # Small enough for several turns, and for two hops, of few numbers.
    (symmetric, "_ROOM_BYTES", 1 << 16),
    (collectives, "one_hop_bytes", lambda transport: 1 << 17),
    (symmetric.SymmetricExchange, "abandon", _abandon),
    (torch.cuda, "Stream", lambda: None),
    (torch.cuda, "stream", nullcontext),
    (Launch, "run", _run_on_the_host),
)


def follow_on_gpu(fault: Fault | None, group: Group, directory: Path, engine: EngineConfig) -> None:
    """A follower with a pretended GPU, and with a fault if there is one for it."""
    become_gpu(is_symmetric=engine.gpu_exchange == "symmetric")
    if fault is not None and fault.rank == group.ranks.rank:
        arm(fault)
    with pretend_cuda():
        follow(group, directory, engine)


def become_gpu(*, is_symmetric: bool) -> None:
    """This process, which has no other life, has a pretended GPU from now on."""
    for patch in (*PATCHES, *(SYMMETRIC_PATCHES if is_symmetric else ())):
        setattr(*patch)
    if is_symmetric:
        round_in_the_interpreter()


def follow_symmetric(group: Group) -> None:
    """A follower of `rank_follow` whose GPU reads the memory of the others."""
    become_gpu(is_symmetric=True)
    with pretend_cuda():
        rank_follow.follow(group)


def follow_without_memory(group: Group) -> None:
    """The same, where this rank cannot."""
    become_gpu(is_symmetric=True)
    symmetric.refuse = lambda devices, is_one_host: ["This rank has none."]
    with pretend_cuda():
        rank_follow.follow(group)


class RefusedMemory(PretendedMemory):
    """On this rank the driver does not share it, which shows when the others look for it."""

    def take(self, num_bytes: int) -> SharedMemory:
        raise RuntimeError("The driver does not share memory.")


def follow_with_refused_memory(group: Group) -> None:
    become_gpu(is_symmetric=True)
    symmetric.TorchMemory = RefusedMemory  # type: ignore[assignment,misc]
    with pretend_cuda():
        rank_follow.follow(group)


def follow_to_first_exchange(group: Group, rank: int, fault: str) -> None:
    """One rank has the fault in the first exchange on its GPU: "kill", or it stays "away"."""
    become_gpu(is_symmetric=True)
    if group.ranks.rank == rank:
        symmetric.SymmetricExchange.gather = partial(_faulty, fault)  # type: ignore[method-assign]
    with pretend_cuda():
        rank_follow.follow(group)


def _faulty(fault: str, part: Tensor) -> Tensor:
    if fault == "kill":
        rank_follow.commit(fault)
    while True:
        time.sleep(_LOOK_S)


class HandedMemory(TorchMemory):
    """torch's, of the host's memory in the place of a GPU's. It is handed over as torch does: with
    sockets in a folder, around the ranks, and receivers keep Python's lock.

    fault: of the rank ``faulty``, as soon as it has said what it will hand over; "" for none.
    """

    def __init__(
        self, folder: str, faulty: int, fault: str, store: Store, ranks: Ranks, device: str
    ) -> None:
        super().__init__(store, ranks, device)
        self._api = _HandingOver(folder, fault if ranks.rank == faulty else "", store, ranks)


class _HandingOver:
    """Of torch's interface what needs a GPU."""

    def __init__(self, folder: str, fault: str, store: Store, ranks: Ranks) -> None:
        self._folder, self._fault, self._store, self._ranks = folder, fault, store, ranks
        self._kernel = ctypes.PyDLL(None, use_errno=True)
        self._number, self._file = 0, -1

    def empty_strided_p2p(self, shape: tuple[int], *_: object) -> Tensor:
        self._file = os.memfd_create("kdecode-handed", os.MFD_CLOEXEC)
        os.ftruncate(self._file, *shape)
        return PretendTensor(_mapped(self._file, *shape))

    def rendezvous(self, own: Tensor, group_name: str) -> SimpleNamespace:
        rank, size = self._ranks.rank, self._ranks.size
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.bind(self._path(os.getpid()))
            entries = PrefixStore(f"CUDASymmetricMemory/{self._number}", self._store)
            self._number += 1
            entries.set(str(rank), str(os.getpid()))
            next_one = [int(entries.get(str(other))) for other in range(size)][(rank + 1) % size]
            if self._fault:
                rank_follow.commit(self._fault)
            files = {rank: self._file}
            for step in range(size - 1):
                sent = files[(rank - step) % size]
                with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", sent))]
                channel.sendmsg([b"fd"], with_it, 0, self._path(next_one))
                files[(rank - step - 1) % size] = self._receive(channel)
        os.unlink(self._path(os.getpid()))
        every = [_mapped(files[other], own.numel()) for other in range(size)]
        return SimpleNamespace(buffer_ptrs=[data.data_ptr() for data in every], alive=every)

    def _receive(self, channel: socket.socket) -> int:
        # It looks first, which is where it waits.
        room = ctypes.create_string_buffer(2)
        if self._kernel.recv(channel.fileno(), room, 2, socket.MSG_PEEK) <= 0:
            raise RuntimeError(f"Failed to receive fd: {os.strerror(ctypes.get_errno())}")
        _, (file,), _, _ = socket.recv_fds(channel, 2, 1)
        return file

    def _path(self, process: int) -> str:
        return f"{self._folder}/symm_mem-{process}"


def _mapped(file: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def follow_handing_over(group: Group, folder: str, faulty: int, fault: str) -> None:
    """A follower of `rank_follow` that is handed the memory of the others as by torch."""
    become_gpu(is_symmetric=True)
    symmetric.TorchMemory = partial(HandedMemory, folder, faulty, fault)  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    with pretend_cuda():
        rank_follow.follow(group)
