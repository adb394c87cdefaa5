"""Blocks of ranks that are all in this process, which signal each other as on several GPUs.

On one device ranks have to come one after the other: all that give, and then all that take.
"""

from __future__ import annotations

import torch

from kdecode.kernels.common.peer_table import LIMIT
from kdecode.parallel.ranks import Ranks
from kdecode.parallel.symmetric import SymmetricBlocks
from kdecode.parallel.symmetric_memory import SharedMemory

# Until a wait in vain gives up; nobody else runs meanwhile.
LIMIT_MS = 20


class _Memory:
    """What one rank takes of memory that is made for all of them at the first one's wish."""

    def __init__(
        self, rank: int, size: int, device: str, made: list[list[torch.Tensor]], *, is_shared: bool
    ) -> None:
        self._rank, self._size, self._device, self._made = rank, size, device, made
        self._is_shared = is_shared
        self._taken = 0

    def take(self, num_bytes: int) -> SharedMemory:
        number, self._taken = self._taken, self._taken + 1
        if number == len(self._made):
            self._made.append(
                [
                    torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
                    for _ in range(self._size)
                ]
            )
        every = self._made[number]
        if self._is_shared:
            every = [memory.share_memory_() for memory in every]
        assert all(memory.numel() == num_bytes for memory in every)
        return SharedMemory(every[self._rank], [memory.data_ptr() for memory in every], every)


def blocks_here(
    size: int, device: str, *, is_shared: bool = False, limit_ms: int = LIMIT_MS
) -> list[SymmetricBlocks]:
    """Of every rank; waits have a limit. is_shared: with processes that are forked afterwards."""
    made: list[list[torch.Tensor]] = []
    found = []
    for rank in range(size):
        memory = _Memory(rank, size, device, made, is_shared=is_shared)
        blocks = SymmetricBlocks(memory, Ranks(rank, size), device)
        blocks.fault[LIMIT] = limit_ms
        found.append(blocks)
    return found
