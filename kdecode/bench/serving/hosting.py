"""When the servers of a comparison are started and ended, if it starts them itself.

Owns which of them run during a pass. What one process happens to have (memory, placement) lasts as
long as it does, so blocks that share a process do not see it; and where the devices are enough for
one server alone, the arms take turns with them. Starting one is `launch`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from kdecode.bench.serving.design import Restart
from kdecode.bench.serving.launch import Launch, launched


class Hosts(Protocol):
    """Whoever has the servers."""

    async def turn(self, server: int, role: int, *, begins_block: bool = False) -> Sequence[int]:
        """Before a server is asked: sees to it that it runs.

        role: which arm it plays; in a null run one server plays both. Returns the servers that were
        started for it, which know nothing of what was warmed up before.
        """


class Standing:
    """Servers that somebody else started."""

    async def turn(self, server: int, role: int, *, begins_block: bool = False) -> Sequence[int]:
        return ()


class Launched:
    """Servers of this process, by the rule of `design.Restart`. All end when the block is left."""

    def __init__(
        self,
        launches: Sequence[Launch],
        restart: Restart,
        say: Callable[[str, str], None] = lambda phase, detail: None,
    ) -> None:
        self._launches = launches
        self._restart = restart
        self._say = say
        self._last: tuple[int, int] | None = None
        self._running: set[int] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Launched:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end()

    async def turn(self, server: int, role: int, *, begins_block: bool = False) -> Sequence[int]:
        is_alone = self._restart == "arm"
        if (is_alone and (server, role) != self._last) or (
            self._restart == "block" and begins_block
        ):
            await self._end()
        self._last = (server, role)
        wanted = (server,) if is_alone else range(len(self._launches))
        new = [number for number in wanted if number not in self._running]
        for number in new:
            launch = self._launches[number]
            self._say(f"starting {launch.name}", launch.url)
            await self._stack.enter_async_context(launched(launch))
            self._running.add(number)
        return new

    async def _end(self) -> None:
        self._running.clear()
        await self._stack.aclose()
