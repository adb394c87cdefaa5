"""An event loop whose time passes only while nothing happens: tests of time without waiting.

Servers and clients of one loop talk over Unix sockets, whose bytes are there as soon as they are
written, so that a run's times depend on no machine. A server's address is any host and port that it
was started under.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

START_NS = 10**12


class _Selector(selectors.DefaultSelector):
    """Moves the clock to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = START_NS

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            # Nobody has a timer and no socket has anything to say.
            raise RuntimeError("The simulation waits for something that will never happen.")
        self.now_ns += round(timeout * 1e9)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self, folder: Path) -> None:
        self._selector_of_time = _Selector()
        self._folder = folder
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        return self._selector_of_time.now_ns / 1e9

    def path(self, host: str, port: int) -> str:
        return str(self._folder / f"{host}-{port}")

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> Any:
        return await self.create_unix_connection(factory, self.path(host, port))


def simulate(folder: Path, main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in simulated time, and returns what it does."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(folder)) as runner:
        return runner.run(main)
