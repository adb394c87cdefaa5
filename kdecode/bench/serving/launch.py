"""Servers that a comparison starts itself, as processes of their own, and ends again.

Owns starting, waiting until they answer, and that nothing of them is left. Does not know what the
commands mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kdecode.bench.serving.http import HttpError, Target, exchange

_POLL_S = 0.2
_END_S = 20.0
_LOG_BYTES = 2000


class LaunchError(Exception):
    """A server that did not come up; the message has the end of its log."""


@dataclass(frozen=True)
class Launch:
    """One server. environment: variables beside those of this process."""

    name: str
    command: Sequence[str]
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 600.0


def free_ports(number: int) -> list[int]:
    """Different ports of the loopback that nobody listens on now.

    Somebody else may take one before its server does: `launched` finds that out.
    """
    with contextlib.ExitStack() as held:
        # All are held until the last one is found, or two of them could be one.
        found = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@asynccontextmanager
async def launched(launch: Launch) -> AsyncIterator[None]:
    """Runs the server until the block is left. Raises LaunchError.

    What answers at the address has to be this server: nobody may answer there before it is started,
    and it has to run when somebody does.
    """
    if await _answers(launch.url):
        raise LaunchError(
            f"{launch.name} was not started: another server answers at {launch.url} already."
        )
    settings = [f"{name}={value}" for name, value in launch.environment.items()]
    command = ["env", *settings, *launch.command] if settings else [*launch.command]
    with tempfile.TemporaryFile() as log:
        try:
            # A session of its own: it may have children, and an interrupt is ours to pass on.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{launch.name}: {command[0]} cannot be started: {error}") from error
        try:
            try:
                async with asyncio.timeout(launch.ready_s):
                    while not await _answers(launch.url):
                        _check_runs(launch, process, log.fileno())
                        await asyncio.sleep(_POLL_S)
                    # Once more: a server that could not have its address ends a moment later.
                    await asyncio.sleep(_POLL_S)
                    _check_runs(launch, process, log.fileno())
            except TimeoutError:
                raise LaunchError(
                    f"{launch.name} did not answer at {launch.url} within {launch.ready_s:g} s:\n"
                    f"{_end_of(log.fileno())}"
                ) from None
            yield
        finally:
            await _end(process)


def _check_runs(launch: Launch, process: asyncio.subprocess.Process, log: int) -> None:
    if process.returncode is not None:
        raise LaunchError(
            f"{launch.name} ended with exit code {process.returncode} before it answered:\n"
            f"{_end_of(log)}"
        )


async def _answers(url: str) -> bool:
    try:
        found = await exchange(Target.from_url(url), "GET", "/health", timeout_s=5)
    except HttpError:
        return False
    return found.status == 200


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to all of it, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
                return


def _end_of(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace")
