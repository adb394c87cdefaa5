"""Values between the GPUs of several ranks of a host: memory of each that all of them read.

The memory is torch's symmetric memory, and there is neither a collective nor a launch that moves a
block: kernels that make a part signal the other GPUs, and kernels that need the parts wait and read
them where they are (`kernels/common/triton_peers.py`). Owns the blocks, the exchanges of the
standard forward through two of them, and what happens where a rank does not come: waits on the
device are bounded, the host asks at the end of every step whether all were in time, and of a broken
group all waits are given up at once. Not torch's default group, which belongs to the process that
embeds the engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from kdecode.kernels.common.peer_table import (
    GIVEN_UP,
    LATE,
    LIMIT,
    MOST_RANKS,
    MOST_WAITING,
    PeerTable,
    fault_words,
)
from kdecode.kernels.contract import PartBlock
from kdecode.parallel.collectives import GroupExchange, Watch, awaited, wait_for_gpu, watched
from kdecode.parallel.monitor import PATIENCE
from kdecode.parallel.ranks import RankError, Ranks
from kdecode.parallel.symmetric_memory import (
    Meeting,
    Memory,
    NotSharedError,
    SharedMemory,
    TorchMemory,
)

# From the first exchange to the first step ranks wait for each other's compilers: only a lost one
# ends that.
_NO_LIMIT_MS = 2**31 - 1
# A row of flags, and then the block.
_FLAG_BYTES = 512
# Of a rank's part in an exchange of the standard forward; larger ones are exchanged in turns.
_ROOM_BYTES = 32 << 20
# torch's name of the memory that CUDA's driver shares, and not a library beside it.
_BACKEND = "CUDA"
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h.
_NATIVE_ATOMICS = 3
# How much of the time that a rank may be silent it may wait for another one's memory.
_OF_SILENCE = 0.5


def refuse(devices: Sequence[int], *, is_one_host: bool) -> list[str]:
    """Every reason why the ranks cannot read each other's memory. devices: the GPUs of this host's
    ranks."""
    reasons = []
    if not is_one_host:
        reasons.append(
            "Symmetric memory is of the GPUs of one host, and the ranks are on several; set "
            "gpu_exchange to 'nccl'."
        )
    if len(devices) > MOST_RANKS:
        reasons.append(
            f"Symmetric memory is for up to {MOST_RANKS} ranks; there are {len(devices)}."
        )
    if find_spec("triton") is None:
        reasons.append(
            "Ranks that share memory signal each other in Triton kernels, and Triton is not "
            "installed here; install the extra: pip install 'kdecode[gpu]'."
        )
    if not _is_in_torch():
        reasons.append(
            f"torch {torch.__version__} here has no symmetric memory of CUDA; install a torch "
            "build for CUDA, or set gpu_exchange to 'nccl'."
        )
        return reasons
    reasons += [
        f"The GPU cuda:{one} cannot read the memory of cuda:{other}, so that they share none; set "
        "gpu_exchange to 'nccl'."
        for one in devices
        for other in devices
        if one < other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if not reasons:
        reasons = [
            f"The atomic operations of cuda:{one} do not reach the memory of cuda:{other}; over "
            "such a link nothing orders the signals of ranks that share memory. Set gpu_exchange "
            "to 'nccl'."
            for one in devices
            for other in devices
            if one != other and not _has_atomics(one, other)
        ]
    reasons += [
        f"Ranks that share memory take GPUs of more than {MOST_WAITING} multiprocessors, since so "
        f"many programs of a launch may wait for others of it; cuda:{device} has {number} for this "
        "process. Set gpu_exchange to 'nccl'."
        for device in devices
        if (number := _multiprocessors(device)) <= MOST_WAITING
    ]
    return reasons


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _has_atomics(one: int, other: int) -> bool:
    """By CUDA's driver, which torch does not ask; not where GPUs reach each other over PCIe alone.

    For GPUs that read each other's memory, so that there is a driver, which torch has started.
    """
    found = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, one, other)
    return status == 0 and found.value == 1


def _is_in_torch() -> bool:
    if not distributed.is_available():
        return False
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.get_backend(torch.device("cuda")) == _BACKEND


class SymmetricBlocks:
    """`kernels.contract.DeviceExchange`: blocks that every rank's GPU reads where they are.

    fault: int32 on the device, `peer_table.fault_words` of them.
    """

    transport = "symmetric"

    def __init__(self, memory: Memory, ranks: Ranks, device: str) -> None:
        self.size = ranks.size
        self.fault = torch.zeros(fault_words(ranks.size), dtype=torch.int32, device=device)
        self._memory, self._ranks, self._device = memory, ranks, device
        self._names: list[str] = []
        # The largest of a name, with what is behind its addresses.
        self._made: dict[str, tuple[PartBlock, object]] = {}
        # Smaller ones of before: plans have their addresses.
        self._outgrown: list[object] = []

    def block(self, name: str, num_bytes: int) -> PartBlock:
        found = self._made.get(name)
        if found is None or found[0].part.numel() < num_bytes:
            if found is not None:
                self._outgrown.append(found)
            found = self._made[name] = self._make(name, num_bytes)
        block, _ = found
        return PartBlock(block.part[:num_bytes], block.sources, None, block.peers)

    def late(self, fault: Sequence[int]) -> tuple[int, str] | None:
        """A rank that was waited for in vain, and for what, by a copy of `fault`; None where every
        wait was in time."""
        for rank, place in enumerate(fault[LATE:]):
            if place:
                return rank, self._names[place - 1]
        return None

    def _make(self, name: str, num_bytes: int) -> tuple[PartBlock, object]:
        shared = self._memory.take(_FLAG_BYTES + num_bytes)
        epoch = torch.zeros(1, dtype=torch.int32, device=self._device)
        table = PeerTable(
            flags=shared.addresses,
            epoch=epoch.data_ptr(),
            fault=self.fault.data_ptr(),
            rank=self._ranks.rank,
            place=len(self._names),
        )
        self._names.append(name)
        block = PartBlock(
            part=shared.own[_FLAG_BYTES:],
            sources=self._addresses([begin + _FLAG_BYTES for begin in shared.addresses]),
            run=None,
            peers=self._addresses(table.words()),
        )
        return block, (shared, epoch)

    def _addresses(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def exchange_between(
    store: Store,
    ranks: Ranks,
    device: str,
    watch: Watch,
    patience_s: float,
    gather: Callable[[Tensor], Tensor],
) -> SymmetricExchange:
    """Every rank calls it, and none goes on before all share memory. gather: of the host's values.

    Raises RankError, and on every rank NotSharedError where one of them cannot share its memory.
    """
    # Of the time in which a rank has to give a sign of life, which none does while torch waits.
    hand_over_s = _OF_SILENCE * patience_s / PATIENCE
    meeting = Meeting(PrefixStore("symmetric", store), ranks, watch, hand_over_s)
    memory = _meet(meeting, ranks, device, gather)

    def make() -> SymmetricExchange:
        shared = WatchedMemory(memory, watch)
        exchange = SymmetricExchange(shared, ranks, watch, patience_s, device)
        # Kernels of a broken group would wait for ever, and the host for them: from the first on.
        watch.on_failure(lambda error: exchange.abandon())
        exchange.gather(torch.zeros(1, 1, device=device))
        exchange.settle()
        exchange.wait_for_compilers()
        return exchange

    return watched(watch, make)


def _meet(
    meeting: Meeting, ranks: Ranks, device: str, gather: Callable[[Tensor], Tensor]
) -> Memory:
    """Memory of which all ranks have shared a first piece. Raises as `exchange_between` does."""

    def take_first() -> tuple[Memory, SharedMemory]:
        memory: Memory = TorchMemory(meeting.store, ranks, device)
        return memory, memory.take(_FLAG_BYTES)

    found = None
    with suppress(NotSharedError):
        found = awaited(meeting, partial(meeting.attempt, take_first))
    # Also who has it hears of others, and keeps the piece until they have looked for it.
    has_none = gather(torch.tensor([[int(found is None)]]))
    if found is None or has_none.any():
        raise NotSharedError(meeting.reason() or "a rank has no such memory")
    return found[0]


class WatchedMemory:
    """`Memory` whose meetings end with the name of a rank that is lost; one that is alive, and has
    not come as far, is awaited."""

    def __init__(self, memory: Memory, watch: Watch) -> None:
        self._memory, self._watch = memory, watch

    def take(self, num_bytes: int) -> SharedMemory:
        return watched(self._watch, partial(self._memory.take, num_bytes))


class SymmetricExchange(GroupExchange):
    """Of tensors on this rank's GPU. blocks: of plans, too.

    A step is what is between `begin` and `settle`, and has two exchanges at least. Its first has a
    block of its own, and two others take turns behind it: so whichever step was before, it has the
    same blocks, and none twice in a row (`peer_table`). No wait on the device takes longer than
    patience_s, but for those between `wait_for_compilers` and the first step.
    """

    transport = "symmetric"

    def __init__(
        self, memory: Memory, ranks: Ranks, watch: Watch, patience_s: float, device: str
    ) -> None:
        super().__init__(ranks, watch, patience_s)
        self._device = device
        # Imported like every kernel: only where it is launched, and not read by a type checker.
        self._kernels: Any = import_module("kdecode.kernels.common.triton_peer_exchange")
        with torch.cuda.device(device):
            self.blocks = SymmetricBlocks(memory, ranks, device)
            # While the device waits, what ends that has to come past it.
            self._beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        is_pinned = torch.cuda.is_available()
        self._limit = torch.zeros(1, dtype=torch.int32, pin_memory=is_pinned)
        self._given_up = torch.ones(1, dtype=torch.int32, pin_memory=is_pinned)
        self._seen = torch.zeros(fault_words(ranks.size), dtype=torch.int32, pin_memory=is_pinned)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._first_room, *self._rooms = (
            self.blocks.block(f"values {turn}", _ROOM_BYTES) for turn in range(3)
        )
        # Of the exchanges to come.
        self._coming: Iterator[PartBlock] = cycle(self._rooms)
        self._is_closed = self._has_limit = False
        self._limit_waits()

    def begin(self) -> None:
        """A step begins. Exchanges that are inside of the steps of plans count as one."""
        self.number += 1
        self.rewind()
        if not self._has_limit:
            self._limit_waits()

    def wait_for_compilers(self) -> None:
        """Until the first step begins, ranks are awaited for as long as they are alive."""
        self._limit_waits(_NO_LIMIT_MS)

    def settle(self) -> None:
        """Returns when the GPU has done everything that it was given.

        Raises RankError where another rank keeps it from that, or did.
        """
        with torch.cuda.device(self._device):
            self._seen.copy_(self.blocks.fault, non_blocking=True)
        wait_for_gpu(self._device, self._watch)
        late = self.blocks.late(self._seen.tolist())
        if late is not None:
            rank, name = late
            raise self._watch.blame(
                RankError(
                    rank,
                    f"did not come within {self._patience_s:g} s while rank {self._ranks.rank} "
                    f"waited for it in the exchange of {name}",
                )
            )

    def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Kernels that wait for another rank end at once, with values that mean nothing."""
        self._is_closed = True
        # A device that has failed takes no copy, and waits for nothing either.
        with (
            suppress(RuntimeError),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._beside),
        ):
            self.blocks.fault[GIVEN_UP : GIVEN_UP + 1].copy_(self._given_up, non_blocking=True)

    def reduce(self, part: Tensor) -> Tensor:
        is_one_hop = self._is_one_hop(part)
        given = part.contiguous().view(-1)
        total = torch.empty(given.numel(), dtype=torch.bfloat16, device=part.device)
        # With room behind them for pieces that reach beyond the end.
        most = _ROOM_BYTES // 4 - self._ranks.size
        for begin in range(0, given.numel(), most):
            numbers, out = given[begin : begin + most], total[begin : begin + most]
            if is_one_hop:
                self._run(self._kernels.sum_launch(self._give(numbers), 0, out))
            else:
                self._add_in_pieces(numbers, out)
        return total.view(part.shape)

    def swap(self, parts: Tensor) -> Tensor:
        given, size = parts.contiguous(), self._ranks.size
        taken = torch.empty_like(given)
        if not given.numel():
            return taken
        row_bytes = given.nbytes // size
        words, out = (_words(tensor, row_bytes) for tensor in (given, taken))
        words = words.view(size, -1)
        columns = words.shape[1]
        most = _ROOM_BYTES // (4 * size) * 4 // words.itemsize
        for begin in range(0, columns, most):
            piece = words[:, begin : begin + most].contiguous()
            each = piece.shape[1]
            block = self._give(piece.view(-1))
            first = self._ranks.rank * each
            self._run(self._kernels.take_launch(block, first, each, out, begin, columns))
        return taken

    def rewind(self) -> None:
        self._coming = chain((self._first_room,), cycle(self._rooms))

    def meet(self) -> None:
        """Returns at once; what is launched behind it begins once every rank has come as far."""
        self._watch.check()
        block, word = self.blocks.block("meeting", 4), self._counter.clone()
        self._run(self._kernels.give_launch(word, block, self._counter))
        self._run(self._kernels.take_launch(block, 0, 1, word, 0, 0))

    def _every(self, part: Tensor) -> Tensor:
        given = part.contiguous().view(-1)
        taken = given.new_empty(self._ranks.size, given.numel())
        words, out = (_words(tensor, given.nbytes) for tensor in (given, taken))
        most = _ROOM_BYTES // words.itemsize
        for begin in range(0, words.numel(), most):
            piece = words[begin : begin + most]
            block, each = self._give(piece), piece.numel()
            self._run(self._kernels.take_launch(block, 0, each, out, begin, words.numel()))
        return taken

    def _add_in_pieces(self, numbers: Tensor, out: Tensor) -> None:
        """Each rank adds a piece, of equal size, and hands it on."""
        each = -(-numbers.numel() // self._ranks.size)
        block, other = self._give(numbers), self._next_room()
        first = self._ranks.rank * each
        self._run(self._kernels.hand_on_launch(block, first, each, other, self._counter))
        self._run(self._kernels.take_launch(other, 0, each, out, 0, each))

    def _give(self, words: Tensor) -> PartBlock:
        room = self._next_room()
        self._run(self._kernels.give_launch(words, room, self._counter))
        return room

    def _next_room(self) -> PartBlock:
        """Raises RankError where the group is broken."""
        # First: what gives it up has broken the group before.
        self._watch.check()
        if self._is_closed:
            raise RuntimeError("The group of this exchange is closed.")
        self.number += 1
        return next(self._coming)

    def _run(self, launch: Any) -> None:
        with torch.cuda.device(self._device):
            launch.run()

    def _limit_waits(self, milliseconds: int | None = None) -> None:
        """Of everything that is launched after this; to the patience of the group if not given."""
        self._has_limit = milliseconds is None
        self._limit.fill_(int(1000 * self._patience_s) if milliseconds is None else milliseconds)
        with torch.cuda.device(self._device):
            self.blocks.fault[LIMIT : LIMIT + 1].copy_(self._limit)


def _words(numbers: Tensor, row_bytes: int) -> Tensor:
    """A contiguous tensor's bytes in one line, four at a time if its rows have whole words."""
    data = numbers.view(-1).view(torch.uint8)
    has_words = row_bytes % 4 == 0 and data.data_ptr() % 4 == 0
    return data.view(torch.int32) if has_words else data
