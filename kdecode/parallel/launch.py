"""Starts the ranks of a model, as processes of this host or as torchrun has started them.

Owns the lives of follower processes and how ranks find each other. On one host rank 0 spawns the
others (torch.multiprocessing), which end with it however it ends. Where torchrun's environment is
there, its processes are the ranks: `start` returns in rank 0 only. Does not know what followers do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from kdecode.config import ConfigError, torch_run
from kdecode.parallel import hosts
from kdecode.parallel.channel import Receiver, Sender
from kdecode.parallel.collectives import GlooExchange, connect, watched
from kdecode.parallel.followers import Followers
from kdecode.parallel.group import Group
from kdecode.parallel.hosts import Line
from kdecode.parallel.monitor import PATIENCE, Monitor
from kdecode.parallel.ranks import RankError, Ranks

# What a follower does with its life: module level, so that it can be named to another process.
Follow = Callable[..., None]

_LOOPBACK = "127.0.0.1"
_LOOPBACK_S = 10.0
# How long a follower of a broken group may take to notice, before its process is ended.
_NOTICE_S = 2.0
_PR_SET_PDEATHSIG = 1
_FAILED, _BROKEN = 1, 3


@dataclass(frozen=True)
class Settings:
    """See `start`."""

    num_threads: int
    timeout_s: float
    start_timeout_s: float
    part_bytes: int | None


@dataclass(frozen=True)
class _Place:
    """How a rank is reached by the others: its host, and its address for gloo.

    index: among the ranks of its host, None where nobody tells.
    """

    host: str
    address: str
    interface: str | None = None
    index: int | None = None


def start(
    size: int,
    follow: Follow,
    args: Sequence[Any] = (),
    *,
    num_threads: int = 1,
    timeout_s: float = 5.0,
    start_timeout_s: float = 600.0,
    part_bytes: int | None = None,
) -> Group:
    """A group of ``size`` ranks of which this is rank 0; the others run ``follow(group, *args)``.

    num_threads: torch's of each follower. timeout_s: how long a rank may give no sign of life.
    start_timeout_s: for processes to start and find each other. part_bytes: the most that a rank
    gives in an exchange of native steps, None without such steps.

    Under torchrun every process calls this, and in all but rank 0 it does not return: it raises
    SystemExit when rank 0 has closed the group. Raises ConfigError where torchrun has started
    another number of processes, RankError where one cannot start.
    """
    settings = Settings(num_threads, timeout_s, start_timeout_s, part_bytes)
    run = torch_run()
    if run is None:
        return _spawn(size, follow, args, settings)
    if run.size != size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but torchrun has started {run.size} processes; "
            "they must be as many."
        )
    ranks = Ranks(run.rank, run.size)
    store = hosts.meet(run, start_timeout_s)
    address = hosts.own_address(run.address, run.port)
    place = _Place(run.host, address, run.interface, run.local_rank)
    if ranks.is_leader:
        lines = hosts.accept(store, ranks, place.address, start_timeout_s)
        return _lead(ranks, lines, store, place, settings)
    # torchrun's signals are for rank 0, which ends the others when it has finished.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    _live(ranks, hosts.call(store, ranks, start_timeout_s), store, place, settings, follow, args)
    raise SystemExit(0)


# Rank 0.


def _spawn(size: int, follow: Follow, args: Sequence[Any], settings: Settings) -> Group:
    lines, ends = {}, {}
    for rank in range(1, size):
        pairs = [socket.socketpair() for _ in range(2)]
        lines[rank], ends[rank] = (Line(*side) for side in zip(*pairs, strict=True))
    # On this host alone, instead of on every interface as the store would listen by itself.
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    _require_loopback(port)
    store = TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    followers = Followers(
        _run_follower,
        {
            rank: (Ranks(rank, size), os.getpid(), ends[rank], port, settings, follow, tuple(args))
            for rank in range(1, size)
        },
    )
    try:
        followers.start()
        for line in ends.values():
            line.close()
        place = _Place("", _LOOPBACK, index=0)
        return _lead(Ranks(0, size), lines, store, place, settings, followers)
    except BaseException:
        followers.end(0)
        raise


def _require_loopback(port: int) -> None:
    """Raises ConfigError where ranks would not reach each other; torch would try for minutes."""
    try:
        socket.create_connection((_LOOPBACK, port), _LOOPBACK_S).close()
    except OSError as error:
        raise ConfigError(
            f"Ranks reach each other through {_LOOPBACK}, and nothing can be reached there on this "
            f"host: {error}. Its loopback interface has to be up."
        ) from error


def _lead(
    ranks: Ranks,
    lines: dict[int, Line],
    store: Store,
    place: _Place,
    settings: Settings,
    followers: Followers | None = None,
) -> Group:
    monitor = Monitor(
        ranks,
        place.host,
        {rank: line.notes for rank, line in lines.items()},
        settings.timeout_s,
        None if followers is None else followers.exit_of,
    )
    segment = None
    try:
        peers = monitor.wait_for_others(settings.start_timeout_s)
        num_hosts = len({place.host, *(peer.host for peer in peers.values())})
        if settings.part_bytes is not None and num_hosts == 1:
            from kdecode.parallel.shared import Segment

            segment = Segment(ranks.size, settings.part_bytes)
        facts = {
            "num_hosts": num_hosts,
            "path": None if segment is None else segment.path,
            "part_bytes": None if segment is None else segment.part_bytes,
        }
        monitor.introduce(facts)
        sender = Sender({rank: line.operations for rank, line in lines.items()}, monitor.check)
        end = None if followers is None else followers.end
        group = _assemble(monitor, sender, store, place, settings, facts, end)
    except BaseException as error:
        monitor.report(error)
        monitor.close()
        raise
    finally:
        if segment is not None:
            segment.close()
    if followers is not None:
        # For a group that nobody closes, before multiprocessing would wait for its daemons.
        util.Finalize(group, _abandon, (monitor, followers), exitpriority=10)
    return group


def _abandon(monitor: Monitor, followers: Followers) -> None:
    monitor.close()
    followers.end(0)


# Followers.


def _run_follower(
    ranks: Ranks,
    parent: int,
    line: Line,
    port: int,
    settings: Settings,
    follow: Follow,
    args: tuple[Any, ...],
) -> None:
    """The main function of a spawned process."""
    _die_with(parent)
    store = TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False)
    place = _Place("", _LOOPBACK, index=ranks.rank)
    _live(ranks, line, store, place, settings, follow, args)
    _exit(0)


def _live(
    ranks: Ranks,
    line: Line,
    store: Store,
    place: _Place,
    settings: Settings,
    follow: Follow,
    args: Sequence[Any],
) -> None:
    """Returns when rank 0 has closed the group; whatever else happens ends the process."""
    torch.set_num_threads(settings.num_threads)
    receiver = Receiver(line.operations)
    monitor = Monitor(ranks, place.host, {0: line.notes}, settings.timeout_s)
    monitor.on_failure(lambda error: _leave(receiver))
    monitor.introduce({})
    try:
        facts = monitor.wait_for_others(settings.start_timeout_s)[0].facts
        group = _assemble(monitor, receiver, store, place, settings, facts, None)
        follow(group, *args)
        monitor.wait_for_end()
        group.close()
    except RankError as error:
        monitor.blame(error)
        _exit(_BROKEN)
    except BaseException as error:
        traceback.print_exc()
        monitor.report(error)
        _exit(_FAILED)


def _leave(receiver: Receiver) -> None:
    """The group is broken: ends this process, soon, whatever it is doing."""
    receiver.interrupt()
    end = threading.Timer(_NOTICE_S, _exit, (_BROKEN,))
    end.daemon = True
    end.start()


def _exit(code: int) -> NoReturn:
    # Without the end of the interpreter, where gloo waits for exchanges that never end; a follower
    # has nothing to put away, and with torch that end takes seconds on a busy machine.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    os._exit(code)


def _die_with(parent: int) -> None:
    """This process is killed when its parent ends, however that does."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError("The end of the parent process cannot be asked for.")
    if os.getppid() != parent:
        # It ended before it could be asked for.
        os._exit(_BROKEN)


# Every rank.


def _assemble(
    monitor: Monitor,
    channel: Sender | Receiver,
    store: Store,
    place: _Place,
    settings: Settings,
    facts: dict[str, Any],
    end_followers: Callable[[float], None] | None,
) -> Group:
    """Connects this rank with all others, when every process is there. Raises RankError."""
    patience_s = PATIENCE * settings.timeout_s
    connections = watched(
        monitor,
        lambda: connect(
            PrefixStore("kdecode", store),
            monitor.ranks,
            address=place.address,
            interface=place.interface,
            # Ours ends first, and with a name.
            timeout_s=2 * patience_s,
        ),
    )
    exchange = GlooExchange(connections, monitor.ranks, monitor, patience_s)
    monitor.progress = lambda: exchange.number
    shared = None
    if facts["path"] is not None:
        from kdecode.parallel import shared as memory

        shared = memory.join(
            facts["path"],
            facts["part_bytes"],
            monitor.ranks,
            num_threads=settings.num_threads,
            timeout_s=settings.timeout_s,
        )
    # Nobody goes on before all are connected, and have what rank 0 offers for a while only.
    exchange.gather(torch.zeros(1, 1))
    return Group(
        monitor,
        channel,
        exchange,
        shared,
        PrefixStore("kdecode-devices", store),
        facts["num_hosts"],
        place.index,
        end_followers,
    )
