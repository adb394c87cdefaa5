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

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from kdecode.kernels.common.peer_table import (
    GIVEN_UP,
    LATE,
    LIMIT,
    PeerTable,
    fault_words,
)
from kdecode.kernels.contract import PartBlock
from kdecode.parallel.collectives import GroupExchange, Watch, wait_for_gpu, watched
from kdecode.parallel.ranks import RankError, Ranks

# Before the first step ranks wait for each other's compilers: only a lost one ends that.
_NO_LIMIT_MS = 2**31 - 1
# A row of flags, and then the block.
_FLAG_BYTES = 512
_MOST_RANKS = _FLAG_BYTES // 4
# Of a rank's part in an exchange of the standard forward; larger ones are exchanged in turns.
_ROOM_BYTES = 32 << 20
# torch's name of the memory that CUDA's driver shares, and not a library beside it.
_BACKEND = "CUDA"


def refuse(devices: Sequence[int], *, is_one_host: bool) -> list[str]:
    """Every reason why the ranks cannot read each other's memory. devices: the GPUs of this host's
    ranks."""
    reasons = []
    if not is_one_host:
        reasons.append(
            "Symmetric memory is of the GPUs of one host, and the ranks are on several; set "
            "gpu_exchange to 'nccl'."
        )
    if len(devices) > _MOST_RANKS:
        reasons.append(
            f"Symmetric memory is for up to {_MOST_RANKS} ranks; there are {len(devices)}."
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
    return reasons


def _is_in_torch() -> bool:
    if not distributed.is_available():
        return False
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.get_backend(torch.device("cuda")) == _BACKEND


@dataclass(frozen=True)
class SharedMemory:
    """own: uint8 zeros on this rank's GPU. addresses: where this GPU finds every rank's, its own
    among them. alive: what keeps them there."""

    own: Tensor
    addresses: Sequence[int]
    alive: Any


class Memory(Protocol):
    """Where the blocks come from. Every rank takes the same sizes in the same order."""

    def take(self, num_bytes: int) -> SharedMemory: ...


class TorchMemory:
    """torch's symmetric memory, for a group of its own that is known to nobody else."""

    def __init__(self, store: Store, ranks: Ranks, device: str) -> None:
        from torch._C._distributed_c10d import (
            ProcessGroup,
            _register_process_group,
            _SymmetricMemory,
        )

        self._device = torch.device(device)
        self._api: Any = _SymmetricMemory
        # A process may have had a group before, and torch keeps their names.
        if ranks.is_leader:
            store.set("name", uuid4().hex)
        self._name = f"kdecode-{store.get('name').decode()}"
        # Which of the two it looks into depends on torch's version; it keeps neither alive.
        self._store = CountedFromZero(store)
        self._group = ProcessGroup(self._store, ranks.rank, ranks.size)
        register: Any = _register_process_group
        register(self._name, self._group)
        self._api.set_group_info(self._name, ranks.rank, ranks.size, self._store)

    def take(self, num_bytes: int) -> SharedMemory:
        with torch.cuda.device(self._device):
            own = self._api.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device)
            # Before the others have it: they may signal at once.
            own.zero_()
            torch.cuda.synchronize()
            handle = self._api.rendezvous(own, self._name)
        return SharedMemory(own, tuple(handle.buffer_ptrs), handle)


class CountedFromZero(Store):
    """The store of a group in which torch's meetings are counted from zero.

    It counts them through the life of a process and names its entries "word/number/...", so that a
    rank whose process has had a group before would wait for others under another number.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _own(self, key: str) -> str:
        word, _, rest = key.partition("/")
        number, _, rest = rest.partition("/")
        if not number.isdigit():
            return key
        if self._first is None:
            self._first = int(number)
        return f"{word}/{int(number) - self._first}/{rest}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._own(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._own(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        given = () if timeout is None else (timeout,)
        self._store.wait([self._own(key) for key in keys], *given)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._own(key))


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

    def block(self, name: str, num_bytes: int) -> PartBlock:
        found = self._made.get(name)
        if found is None or found[0].part.numel() < num_bytes:
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
    store: Store, ranks: Ranks, device: str, watch: Watch, patience_s: float
) -> SymmetricExchange:
    """Every rank calls it, and none goes on before all share memory. Raises RankError."""

    def make() -> SymmetricExchange:
        memory = TorchMemory(PrefixStore("symmetric", store), ranks, device)
        exchange = SymmetricExchange(memory, ranks, watch, patience_s, device)
        exchange.gather(torch.zeros(1, 1, device=device))
        exchange.settle()
        return exchange

    return watched(watch, make)


class SymmetricExchange(GroupExchange):
    """Of tensors on this rank's GPU, through two blocks that take turns. blocks: of plans, too.

    A step is what is between `begin` and `settle`. From the first one on no wait on the device
    takes longer than patience_s.
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
        self._rooms = [self.blocks.block(f"values {turn}", _ROOM_BYTES) for turn in range(2)]
        self._is_closed = self._has_limit = False
        self._limit_waits(_NO_LIMIT_MS)

    def begin(self) -> None:
        """A step begins. Exchanges that are inside of the steps of plans count as one."""
        self.number += 1
        if not self._has_limit:
            self._has_limit = True
            self._limit_waits(int(1000 * self._patience_s))

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
                    f"of {self._ranks.size} did not come within {self._patience_s:g} s while rank "
                    f"{self._ranks.rank} waited for it in the exchange of {name}",
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
        """Of two in turn, as `peer_table` wants it. Raises RankError where the group is broken."""
        # First: what gives it up has broken the group before.
        self._watch.check()
        if self._is_closed:
            raise RuntimeError("The group of this exchange is closed.")
        self.number += 1
        self._rooms.reverse()
        return self._rooms[0]

    def _run(self, launch: Any) -> None:
        with torch.cuda.device(self._device):
            launch.run()

    def _limit_waits(self, milliseconds: int) -> None:
        """Of everything that is launched after this."""
        self._limit.fill_(milliseconds)
        with torch.cuda.device(self._device):
            self.blocks.fault[LIMIT : LIMIT + 1].copy_(self._limit)


def _words(numbers: Tensor, row_bytes: int) -> Tensor:
    """A contiguous tensor's bytes in one line, four at a time if its rows have whole words."""
    data = numbers.view(-1).view(torch.uint8)
    has_words = row_bytes % 4 == 0 and data.data_ptr() % 4 == 0
    return data.view(torch.int32) if has_words else data
