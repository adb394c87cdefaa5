"""Ranks as processes that have the blocks of all of them at the same addresses.

For kernels that wait for another rank in the middle: in one process Triton's interpreter would wait
for a rank that comes after it. What the ranks share is made before they part.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch

# Longer than any of them takes on a busy machine.
LIMIT_S = 120.0
FORKED = multiprocessing.get_context("fork")


def run_apart(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns, in a process of its own: tensors, and dictionaries and lists of them.

    AssertionError with what one of them raised, or if one is not done in time.
    """
    processes, ends = [], []
    for body in bodies:
        ours, theirs = FORKED.Pipe(duplex=False)
        process = FORKED.Process(target=_run, args=(body, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        return _collect(ends)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(ends: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    end_s = monotonic() + LIMIT_S
    while len(results) < len(ends):
        awaited = [end for number, end in enumerate(ends) if number not in results]
        ready = wait(awaited, timeout=max(0.0, end_s - monotonic()))
        assert ready, f"Only ranks {sorted(results)} were done in {LIMIT_S:g} s."
        for end in ready:
            assert isinstance(end, Connection)
            # Tensors as bytes: they outlive the process that they come from.
            answer = torch.load(io.BytesIO(end.recv_bytes()), weights_only=True)
            assert "error" not in answer, answer["error"]
            results[ends.index(end)] = answer["value"]
    return [results[number] for number in range(len(ends))]


def _run(body: Callable[[], Any], end: Connection) -> None:
    try:
        answer = {"value": body()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    written = io.BytesIO()
    torch.save(answer, written)
    end.send_bytes(written.getvalue())
    end.close()
    # Without what the process that it comes from would do at its end.
    os._exit(0)
