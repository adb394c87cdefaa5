"""Memory that the GPUs of several ranks read: where it comes from, and how ranks meet for it.

torch's symmetric memory; ranks meet through a store. Owns that such a meeting is a watched one: it
lasts for as long as the group is whole, and a rank that cannot share its memory tells the others,
which would wait for it. Knows neither blocks nor what they are for (`symmetric.py`).

torch keeps Python's lock through a whole meeting, so that nobody of this process watches it while
it waits for another rank. There are two such waits. In the store it comes back to Python, which
gives the lock up. Then ranks hand each other their memory over sockets: a receiver would wait for
ever for one that is lost in between, so that these have a limit (`handing_over.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from kdecode.parallel.collectives import Watch
from kdecode.parallel.handing_over import limit_sockets
from kdecode.parallel.ranks import RankError, Ranks

Made = TypeVar("Made")

# How often it is looked whether another rank has come.
_LOOK_S = 0.005
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# What a rank that cannot share its memory leaves in the store.
_REFUSED = "refused"


class NotSharedError(RuntimeError):
    """The ranks cannot share memory; the message names one that cannot, and why."""


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
    """torch's symmetric memory, for a group of its own that is known to nobody else.

    store: a `CountedFromZero`.
    """

    def __init__(self, store: Store, ranks: Ranks, device: str) -> None:
        from torch._C._distributed_c10d import (
            ProcessGroup,
            _register_process_group,
            _SymmetricMemory,
        )

        # Nothing here is sent to all at once, and with it ranks also wait inside of the driver.
        os.putenv(_NO_MULTICAST, "1")
        self._device = torch.device(device)
        self._api: Any = _SymmetricMemory
        # A process may have had a group before, and torch keeps their names.
        if ranks.is_leader:
            store.set("name", uuid4().hex)
        self._name = f"kdecode-{store.get('name').decode()}"
        # Which of the two it looks into depends on torch's version; it keeps neither alive.
        self._store = store
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

    check: raises what ends a wait. None of them has a bound of the store's own, and none keeps
    others of this process from the store meanwhile. hand_over_s: how long torch may wait for the
    memory of another rank, which it does behind an entry that says what this one has.
    """

    def __init__(self, store: Store, check: Callable[[], None], hand_over_s: float) -> None:
        super().__init__()
        self._store, self._check, self._hand_over_s = store, check, hand_over_s
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
        limit_sockets(self._hand_over_s)
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._own(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get([self._own(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._own(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        begin = time.monotonic()
        while not self.check(keys):
            self._check()
            if timeout is not None and time.monotonic() - begin > timeout.total_seconds():
                raise TimeoutError(f"{keys} did not come within {timeout}.")
            time.sleep(_LOOK_S)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._own(key))


class Meeting:
    """The watch over ranks that meet to share memory: it also ends where one of them cannot.

    store: for the meeting itself. hand_over_s: see `CountedFromZero`.
    """

    def __init__(self, store: Store, ranks: Ranks, watch: Watch, hand_over_s: float) -> None:
        self.store = CountedFromZero(store, self.check, hand_over_s)
        self._entries, self._ranks, self._watch = store, ranks, watch

    def check(self) -> None:
        """Raises RankError where the group is broken, NotSharedError where a rank cannot share."""
        self._watch.check()
        reason = self.reason()
        if reason is not None:
            raise NotSharedError(reason)

    def attempt(self, make: Callable[[], Made]) -> Made | None:
        """What ``make`` returns; None where it fails, of which the other ranks are told."""
        try:
            return make()
        except RankError:
            raise
        except Exception as error:
            # What kept this rank waiting may be the first one's word.
            if self.reason() is None:
                what = f"{type(error).__name__}: {error}"
                self._entries.set(_REFUSED, f"rank {self._ranks.rank} cannot share memory: {what}")
            return None

    def reason(self) -> str | None:
        """Which rank cannot share its memory, and why; None where none has said so."""
        try:
            has_one = self._entries.check([_REFUSED])
            return self._entries.get(_REFUSED).decode() if has_one else None
        except RuntimeError as error:  # it ends with the rank that keeps it
            raise self._watch.blame(error) from error
