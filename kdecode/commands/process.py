"""The process around a command: its signals, and standard streams that cannot be written.

Owns which signals end a command and how, and what happens where stdout or stderr is closed or its
disk is full. Imports next to nothing: it is what makes an interrupt during the other imports quiet.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType, TracebackType
    from typing import Any, TypeVar

    Found = TypeVar("Found")


class OutputError(Exception):
    """A file that could not be written after the work was done; the message names it."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP; like an interrupt it passes every handler of errors on its way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class EndingSignals:
    """Inside of it, SIGTERM and SIGHUP raise `Terminated`, so that what is half made is removed.

    A signal that the process was started to ignore (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndingSignals:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                try:
                    self._before[number] = signal.signal(number, _terminate)
                except ValueError:
                    # Not the main thread: signals are somebody else's.
                    break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


async def until_signal(main: Coroutine[Any, Any, Found]) -> Found:
    """Runs `main`, and cancels it where SIGTERM or SIGHUP arrives, so that it ends what it holds.

    Inside of a loop the exception of `EndingSignals` would be the end of whichever callback was
    running, and of nothing else.
    """
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def end(number: int) -> None:
        if not received and task is not None:
            received.append(number)
            task.cancel()

    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is _terminate]
    for number in ours:
        loop.add_signal_handler(number, end, number)
    try:
        return await main
    except asyncio.CancelledError:
        if received:
            raise Terminated(received[0]) from None
        raise
    finally:
        for number in ours:
            loop.remove_signal_handler(number)
            signal.signal(number, _terminate)


def end_quietly(exit_code: int) -> None:
    """For the end of the process: an interrupt of the interpreter's own exit is its end."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(exit_code))


def _terminate(number: int, frame: FrameType | None) -> None:
    # A second one must not interrupt the removal of what is half made.
    signal.signal(number, signal.SIG_IGN)
    raise Terminated(number)


class Stream:
    """A standard stream that keeps what went wrong with it, and is there even if it is closed.

    has_to_work: for stdout, whose errors end the command. A command whose work is done has not
    failed because nobody can read its notes, so what stderr cannot take is lost.
    """

    def __init__(self, stream: Any, *, has_to_work: bool) -> None:
        self._stream = stream
        self._has_to_work = has_to_work
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._try(lambda: self._stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and bool(self._stream.isatty())

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            action()
        except OSError as error:
            self.error = error
            self._end_nowhere()
            if self._has_to_work:
                raise

    def _end_nowhere(self) -> None:
        """So that what is left in a buffer does not fail once more when the interpreter exits."""
        if self._stream is None:
            return
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            # No file of the system: nothing is flushed at exit.
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Streams:
    """Inside of it, stdout and stderr are `Stream`s, whatever the process was started with."""

    def __enter__(self) -> Streams:
        # Else the next file that is opened would be what C libraries take for stdout or stderr.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
        self._before = sys.stdout, sys.stderr
        self._stdout = Stream(sys.stdout, has_to_work=True)
        stdout: Any = self._stdout
        stderr: Any = Stream(sys.stderr, has_to_work=False)
        sys.stdout, sys.stderr = stdout, stderr
        return self

    def output_error(self) -> OSError | None:
        """Why not all of the output was written; None where it was."""
        try:
            self._stdout.flush()
        except OSError as error:
            return error
        return self._stdout.error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.stdout, sys.stderr = self._before
