"""Who is alive, and who is to blame: each rank's watch over those that it has a line to.

Owns the thread that beats for this rank and listens to the others, and the verdict: the first fault
that is certain ends the group, on every rank, with a `RankError` that names the rank at fault and
not the ones that suffered from it. Rank 0 watches every follower and followers watch rank 0, so
that followers learn of each other from rank 0. Does not know how processes are started, what they
compute or how values are exchanged.

Certain is what a rank says of itself (an error, that it leaves), that its line is closed, and that
it has given no sign of life for ``timeout_s``: neither a beat, nor, on this host, any use of a
core. An exchange that failed is none of these: who suffered from it complains, and is heard only
once nobody has been found at fault.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdecode.parallel.channel import ChannelClosedError, Notes
from kdecode.parallel.ranks import RankError, Ranks

__all__ = ["Complaint", "Monitor", "Peer", "Pulse", "RankError"]

_BEATS_PER_TIMEOUT = 10
_MAX_BEAT_S = 0.5
# How many times longer a rank may be silent that uses a core, or be awaited that is alive.
PATIENCE = 12


class Pulse:
    """Whether a process of this host is doing anything, as its kernel tells."""

    def __init__(self, process: int) -> None:
        self._path = Path(f"/proc/{process}/stat")
        self._ticks = -1
        self.is_stopped = False

    def beats(self) -> bool:
        """Whether it has used a core since the last call, or wants one. False if it is stopped."""
        try:
            # Behind the name, which may have any character: state, ..., user and system time.
            fields = self._path.read_text().rpartition(")")[2].split()
        except OSError:
            return False
        state, ticks = fields[0], int(fields[11]) + int(fields[12])
        before, self._ticks = self._ticks, ticks
        self.is_stopped = state in "Tt"
        return not self.is_stopped and state != "Z" and (state == "R" or ticks > before >= 0)


@dataclass
class Peer:
    """A rank at the other end of a line. process: once it has introduced itself."""

    rank: int
    notes: Notes
    heard_at: float
    beat_at: float
    process: int | None = None
    host: str = ""
    pulse: Pulse | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    # It has said why it goes, so that the end of its line is no fault.
    is_leaving: bool = False
    # Since when its line is closed.
    gone_at: float | None = None
    exchanges: int = 0


@dataclass(frozen=True)
class Complaint:
    """An exchange failed for ``rank``, which waited for ``awaited`` if it knows whom."""

    rank: int
    awaited: int | None
    what: str
    exchanges: int
    at: float


class Monitor:
    """This rank's watch. lines: a connected socket to every rank that is watched.

    exit_of: in words, how the process of a rank has ended; None as long as it has not; not given
    where that cannot be known. progress: how many exchanges this rank has begun. Methods may be
    called from any thread.
    """

    def __init__(
        self,
        ranks: Ranks,
        host: str,
        lines: Mapping[int, socket.socket],
        timeout_s: float,
        exit_of: Callable[[int], str | None] | None = None,
    ) -> None:
        self.ranks = ranks
        self.host = host
        self.timeout_s = timeout_s
        self.progress: Callable[[], int] = lambda: 0
        self._exit_of = exit_of
        self._beat_s = min(_MAX_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)
        now = time.monotonic()
        self._peers = {rank: Peer(rank, Notes(line), now, now) for rank, line in lines.items()}
        self._changed = threading.Condition(threading.RLock())
        self._failure: RankError | None = None
        self._complaints: list[Complaint] = []
        self._callbacks: list[Callable[[RankError], None]] = []
        self._is_closing = False
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kdecode-monitor", daemon=True)
        self._thread.start()

    # What the rank itself asks and says.

    @property
    def failure(self) -> RankError | None:
        """The verdict; None as long as the group is whole."""
        return self._failure

    def check(self) -> None:
        """Raises RankError once the group is at its end."""
        if self._failure is not None:
            raise self._failure

    def introduce(self, facts: Mapping[str, Any]) -> None:
        """Tells the others who this is; from now on it is missed where it falls silent."""
        self._say({"kind": "hello", "process": os.getpid(), "host": self.host, "facts": facts})

    def wait_for_others(self, timeout_s: float) -> dict[int, Peer]:
        """Every watched rank, once all have introduced themselves. Raises RankError."""
        self._wait(lambda peer: peer.process is not None, timeout_s, "has not started")
        return dict(self._peers)

    @property
    def processes(self) -> dict[int, int]:
        """Of the watched ranks that have introduced themselves."""
        with self._changed:
            return {p.rank: p.process for p in self._peers.values() if p.process is not None}

    def tell_ready(self) -> None:
        self._say({"kind": "ready"})

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Whether the watched ranks end the group in order. Raises RankError where they fail."""
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._failure or all(peer.is_leaving for peer in self._peers.values()),
                timeout_s,
            )
        self.check()
        return bool(is_over)

    def wait_until_ready(self) -> None:
        """Until every watched rank has said so; as long as they are alive. Raises RankError."""
        self._wait(lambda peer: peer.is_ready, None, "is not ready")

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        """Called once with the verdict, from any thread; at once where there is one already."""
        with self._changed:
            if self._failure is None:
                self._callbacks.append(callback)
                return
        callback(self._failure)

    def report(self, error: BaseException) -> RankError:
        """This rank is at fault; returns the verdict, which may be an earlier one."""
        what = f"raised {type(error).__name__}: {error}"
        if not self.ranks.is_leader:
            self._say({"kind": "error", "what": what})
        return self._fail(self.ranks.rank, what)

    def blame(self, error: BaseException) -> RankError:
        """Who is at fault for an error of an exchange: waits until it is certain, within a bound.

        A little more than ``timeout_s``, after which a rank that stands still has been found.
        """
        awaited = error.rank if isinstance(error, RankError) else None
        what = error.what if isinstance(error, RankError) else str(error).split("\n")[0]
        at = self.progress()
        if not self.ranks.is_leader:
            self._say({"kind": "complaint", "awaited": awaited, "what": what, "at": at})
        with self._changed:
            self._complain(self.ranks.rank, awaited, what, at)
            # A follower judges later than rank 0, which sees more.
            limit_s = self._hearing_s * (1 if self.ranks.is_leader else 2) + self._beat_s
            self._changed.wait_for(lambda: self._failure is not None, limit_s)
        return self._failure or self._fail(*_verdict(self._complaints, self._progress_of_all()))

    def end(self) -> None:
        """The group ends in order: that lines are closed is no fault from now on."""
        with self._changed:
            for peer in self._peers.values():
                peer.is_leaving = True
        self._say({"kind": "end"})

    def close(self) -> None:
        """Ends the watch. Whoever was not told `end` finds this rank gone."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                for peer in self._peers.values():
                    selector.register(peer.notes, selectors.EVENT_READ, peer)
                self._watch(selector)
        except Exception as error:
            self.report(error)
        finally:
            self._woken.close()
            for peer in self._peers.values():
                peer.notes.close()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        due = time.monotonic()
        while not self._is_closing:
            for key, _ in selector.select(max(0.0, due - time.monotonic())):
                if key.data is not None and not self._listen(key.data):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if now >= due:
                if now - due > self._beat_s:
                    # This process did not run itself: the others' beats are still to be read.
                    self._forgive(now, now - due)
                self._say({"kind": "beat", "exchanges": self.progress()})
                self._judge(now)
                due = now + self._beat_s

    def _listen(self, peer: Peer) -> bool:
        """False once nothing more can come from it."""
        try:
            notes = peer.notes.read()
        except ChannelClosedError:
            peer.gone_at = time.monotonic()
            self._judge_gone(peer, peer.gone_at)
            return False
        peer.heard_at = peer.beat_at = time.monotonic()
        for note in notes:
            self._take(peer, note)
        return True

    def _take(self, peer: Peer, note: Mapping[str, Any]) -> None:
        kind = note["kind"]
        with self._changed:
            if kind == "hello":
                peer.process, peer.host, peer.facts = note["process"], note["host"], note["facts"]
                peer.pulse = Pulse(note["process"]) if peer.host == self.host else None
            elif kind == "ready":
                peer.is_ready = True
            elif kind == "beat":
                peer.exchanges = note["exchanges"]
            elif kind == "complaint":
                peer.exchanges = note["at"]
                self._complain(peer.rank, note["awaited"], note["what"], note["at"])
            elif kind in ("end", "leaves"):
                peer.is_leaving = True
            self._changed.notify_all()
        if kind == "error":
            peer.is_leaving = True
            self._fail(peer.rank, note["what"])
        elif kind == "leaves":
            self._fail(peer.rank, f"has left: {note['why']}")
        elif kind == "verdict":
            self._end_with(RankError(note["rank"], note["what"]), None)

    def _judge(self, now: float) -> None:
        for peer in self._peers.values():
            if peer.gone_at is not None:
                self._judge_gone(peer, now)
            if peer.process is None or peer.gone_at is not None or peer.is_leaving:
                continue
            if now - peer.heard_at > 2 * self._beat_s and peer.pulse is not None:
                uses_a_core = peer.pulse.beats()
                if uses_a_core and now - peer.beat_at < PATIENCE * self.timeout_s:
                    peer.heard_at = now
            if now - peer.heard_at > self.timeout_s:
                state = "is stopped and " if peer.pulse and peer.pulse.is_stopped else ""
                self._fail(
                    peer.rank, f"{state}has given no sign of life for {now - peer.beat_at:.1f} s"
                )
        if (
            self.ranks.is_leader
            and self._complaints
            and now - self._complaints[0].at > self._hearing_s
        ):
            self._fail(*_verdict(self._complaints, self._progress_of_all()))

    def _judge_gone(self, peer: Peer, now: float) -> None:
        """Of a process that ends, the line is closed before it can be asked how it ended."""
        if peer.is_leaving or peer.gone_at is None:
            return
        how = None if self._exit_of is None else self._exit_of(peer.rank)
        if how is not None:
            self._fail(peer.rank, how)
            return
        # One that has not even started keeps nobody waiting, and may take long on a busy machine.
        limit_s = self.timeout_s * (PATIENCE if peer.process is None else 1)
        if self._exit_of is None or now - peer.gone_at > limit_s:
            self._fail(peer.rank, "is gone: its line was closed")

    def _forgive(self, now: float, seconds: float) -> None:
        for peer in self._peers.values():
            peer.heard_at = min(now, peer.heard_at + seconds)
            peer.beat_at = min(now, peer.beat_at + seconds)

    # Shared by both sides; every caller may be in any thread.

    @property
    def _hearing_s(self) -> float:
        """How long after a complaint a rank that stood still already must have been found."""
        return self.timeout_s + 2 * self._beat_s

    def _say(self, note: Mapping[str, Any]) -> None:
        for peer in self._peers.values():
            if peer.gone_at is None:
                peer.notes.write(note)

    def _complain(self, rank: int, awaited: int | None, what: str, exchanges: int) -> None:
        now = time.monotonic()
        self._complaints.append(Complaint(rank, awaited, what, exchanges, now))

    def _progress_of_all(self) -> dict[int, int]:
        known = {rank: peer.exchanges for rank, peer in self._peers.items()}
        return known | {self.ranks.rank: self.progress()}

    def _wait(self, is_done: Callable[[Peer], bool], timeout_s: float | None, what: str) -> None:
        def missing() -> list[int]:
            return [rank for rank, peer in self._peers.items() if not is_done(peer)]

        with self._changed:
            self._changed.wait_for(lambda: self._failure or not missing(), timeout_s)
            late = missing()
        self.check()
        if late:
            raise self._fail(late[0], f"{what} within {timeout_s:g} s")

    def _fail(self, rank: int, what: str) -> RankError:
        """A fault that this rank has found. Returns the verdict, which may be an earlier one."""
        error = RankError(rank, f"of {self.ranks.size} {self._process_of(rank)}{what}")
        if self.ranks.is_leader:
            return self._end_with(error, {"kind": "verdict", "rank": rank, "what": error.what})
        # Whoever fails has said so; for another's fault a follower goes without being asked.
        is_own = rank == self.ranks.rank
        return self._end_with(error, None if is_own else {"kind": "leaves", "why": str(error)})

    def _end_with(self, error: RankError, note: Mapping[str, Any] | None) -> RankError:
        """note: for the others. Returns the verdict, which may be an earlier one."""
        with self._changed:
            if self._failure is not None:
                return self._failure
            if note is not None:
                # Before any thread of this rank can know: it may end the process at once.
                self._say(note)
            self._failure = error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(error)
        return error

    def _process_of(self, rank: int) -> str:
        process = os.getpid() if rank == self.ranks.rank else None
        if rank in self._peers:
            process = self._peers[rank].process
        return "" if process is None else f"(process {process}) "


def _verdict(complaints: list[Complaint], progress: Mapping[int, int]) -> tuple[int, str]:
    """Whom to name where nobody was found at fault: (rank, what it did).

    The rank that a complaint names, else the one that has begun the fewest exchanges, else the
    one whose exchange failed first.
    """
    for complaint in complaints:
        if complaint.awaited is not None:
            return complaint.awaited, complaint.what
    first = complaints[0]
    behind = min(progress, key=lambda rank: progress[rank])
    if progress[behind] < first.exchanges:
        return behind, (
            f"is alive but has begun {progress[behind]} exchanges, and rank {first.rank} waited "
            f"for it in number {first.exchanges}: {first.what}"
        )
    return first.rank, f"could not exchange with the others, which are alive: {first.what}"
