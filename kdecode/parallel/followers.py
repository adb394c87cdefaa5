"""The processes that rank 0 starts on its own host.

Owns the thread that they are children of, in the eyes of the system: they are killed when it ends,
so that it lives as long as they. Does not know what they do.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch import multiprocessing

# Between the end of a process and its exit status.
_MOMENT_S = 0.05
# A killed process ends at once, or waits for a disk and is the system's.
_KILLED_S = 2.0


class Followers:
    """One process for each rank of ``args``, running ``main(*args[rank])``; both are pickled."""

    def __init__(self, main: Callable[..., None], args: Mapping[int, tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: dict[int, BaseProcess] = {
            rank: context.Process(
                target=main, args=args[rank], name=f"kdecode-rank-{rank}", daemon=True
            )
            for rank in args
        }
        # Of two threads that ask for the same exit status, one would not get it.
        self._asking = threading.Lock()
        self._is_over = threading.Event()
        self._started: Future[None] = Future()

    def start(self) -> None:
        """Returns when all processes run; they have not imported anything yet."""
        threading.Thread(target=self._own, name="kdecode-followers", daemon=True).start()
        self._started.result()

    def exit_of(self, rank: int) -> str | None:
        """In words, how a process has ended; None where it has not, after a moment."""
        code = self._exit_code(rank, _MOMENT_S)
        if code is None:
            return None
        return f"exited with code {code}" if code >= 0 else f"died with signal {-code}"

    def end(self, wait_s: float) -> None:
        """Waits so long for processes that end by themselves, then kills the others."""
        deadline = time.monotonic() + wait_s
        for rank, process in self._processes.items():
            if process.ident is None:
                continue
            if self._exit_code(rank, max(0.0, deadline - time.monotonic())) is None:
                process.kill()
        for rank, process in self._processes.items():
            if process.ident is not None:
                self._exit_code(rank, _KILLED_S)
        self._is_over.set()

    def _exit_code(self, rank: int, wait_s: float) -> int | None:
        deadline = time.monotonic() + wait_s
        process = self._processes[rank]
        while True:
            with self._asking:
                process.join(0)
                code = process.exitcode
            left_s = deadline - time.monotonic()
            if code is not None or left_s <= 0:
                return code
            connection.wait([process.sentinel], left_s)

    def _own(self) -> None:
        # Before: it would unblock what follows in the thread that happens to start it.
        resource_tracker.ensure_running()
        # Inherited: what a terminal or a supervisor sends to all processes is for rank 0, which
        # ends the others when it has finished.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            for process in self._processes.values():
                process.start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        self._is_over.wait()
