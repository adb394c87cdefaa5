"""How the ranks that torchrun has started find each other, on one host or several.

Owns the lines between rank 0 and each follower: two TCP connections, of which the store that
torchrun runs says where they are accepted. The store has a word that whoever calls must know; who
can read the store is trusted, as in torch.distributed itself.
"""

from __future__ import annotations

import json
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kdecode.config import ConfigError, TorchRun
from kdecode.parallel.channel import Frames, framed
from kdecode.parallel.ranks import RankError, Ranks

_KINDS = ("operations", "notes")
# How long a caller may take to say who it is; longer, and it is none of ours.
_GREETING_S = 5.0
_MAX_GREETING_BYTES = 1024
# Who waits longer for the others says so.
_NOTICE_S = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Line:
    """What connects rank 0 and one follower. operations: one way; notes: in both directions."""

    operations: socket.socket
    notes: socket.socket

    def close(self) -> None:
        self.operations.close()
        self.notes.close()


def meet(run: TorchRun, timeout_s: float) -> Store:
    """The store of the processes that torchrun has started. Raises ConfigError."""
    notice = threading.Timer(
        _NOTICE_S,
        log.warning,
        (
            "rank %d of %d waits for the others at %s:%d, for %g s at most; it is a rank of "
            "torchrun because RANK and WORLD_SIZE are set",
            *(run.rank, run.size, run.address, run.port, timeout_s),
        ),
    )
    notice.daemon = True
    notice.start()
    try:
        with _signals_that_end():
            store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The processes that torchrun has started do not find each other: {error}"
        ) from error
    finally:
        notice.cancel()
    return PrefixStore("kdecode-lines", store)


@contextmanager
def _signals_that_end() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once: torch waits where no handler of Python's runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def own_address(address: str, port: int) -> str:
    """The address of this host by which it reaches, and is reached from, another one's."""
    family, _, _, _, there = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing; chooses the route.
        probe.connect(there)
        return str(probe.getsockname()[0])


def accept(store: Store, ranks: Ranks, address: str, timeout_s: float) -> dict[int, Line]:
    """Rank 0: a line to every follower. Raises RankError for one that does not call."""
    if store.add("groups", 1) > 1:
        raise ConfigError(
            "These processes of torchrun have had a group of ranks already; they can have one, "
            "because a follower's process lives for it."
        )
    deadline = time.monotonic() + timeout_s
    word = secrets.token_hex(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: dict[tuple[int, str], socket.socket] = {}
    with socket.create_server((address, 0), family=family, backlog=2 * ranks.size) as server:
        port = server.getsockname()[1]
        store.set("leader", json.dumps({"address": address, "port": port, "word": word}))
        while len(found) < len(_KINDS) * (ranks.size - 1):
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                caller, _ = server.accept()
            except TimeoutError:
                missing = next(r for r in range(1, ranks.size) if (r, _KINDS[1]) not in found)
                raise RankError(
                    missing, f"of {ranks.size} has not called within {timeout_s:g} s"
                ) from None
            key = _caller(caller, word, ranks.size)
            if key is None or key in found:
                caller.close()
                continue
            found[key] = _prepared(caller)
    return {rank: Line(*(found[rank, kind] for kind in _KINDS)) for rank in range(1, ranks.size)}


def call(store: Store, ranks: Ranks, timeout_s: float) -> Line:
    """A follower: its line to rank 0. Raises ConfigError where that cannot be reached."""
    store.set_timeout(timedelta(seconds=timeout_s))
    leader = json.loads(store.get("leader"))
    sockets = []
    for kind in _KINDS:
        try:
            line = socket.create_connection((leader["address"], leader["port"]), timeout_s)
        except OSError as error:
            raise ConfigError(
                f"Rank 0 cannot be reached at {leader['address']}:{leader['port']} from rank "
                f"{ranks.rank}: {error}. MASTER_ADDR must be an address that every host reaches."
            ) from error
        greeting = {"word": leader["word"], "rank": ranks.rank, "kind": kind}
        line.sendall(framed(json.dumps(greeting).encode()))
        sockets.append(_prepared(line))
    return Line(*sockets)


def _prepared(line: socket.socket) -> socket.socket:
    line.settimeout(None)
    # An operation is small, and is waited for.
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _caller(line: socket.socket, word: str, size: int) -> tuple[int, str] | None:
    """Which follower calls, and for what; None where it is none of ours."""
    greeting = _greeting(line)
    rank, kind = greeting.get("rank"), greeting.get("kind")
    if greeting.get("word") != word or not isinstance(rank, int) or kind not in _KINDS:
        return None
    return (rank, kind) if 1 <= rank < size else None


def _greeting(line: socket.socket) -> dict[str, Any]:
    """Who a caller says it is; nothing where it does not."""
    line.settimeout(_GREETING_S)
    frames = Frames()
    try:
        # A byte at a time: what follows the greeting is for whoever uses the line.
        for _ in range(_MAX_GREETING_BYTES):
            frames.add(line.recv(1))
            message = frames.take()
            if message is not None:
                greeting = json.loads(message)
                return greeting if isinstance(greeting, dict) else {}
    except (OSError, ValueError):
        return {}
    return {}
