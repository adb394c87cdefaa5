"""Who is found at fault, without a single process: monitors of several ranks in this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import until

from kdecode.parallel.channel import Notes
from kdecode.parallel.monitor import Monitor, Pulse
from kdecode.parallel.ranks import RankError, Ranks

TIMEOUT_S = 0.5


class Ring:
    """Monitors of all ranks. lines[rank]: the follower's end where it has no monitor."""

    def __init__(self, size: int, silent: tuple[int, ...]) -> None:
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self.lines = {rank: Notes(pairs[rank][1]) for rank in silent}
        self.leader = _monitor(0, size, {rank: pair[0] for rank, pair in pairs.items()})
        self.followers = {
            rank: _monitor(rank, size, {0: pair[1]})
            for rank, pair in pairs.items()
            if rank not in silent
        }

    @property
    def monitors(self) -> list[Monitor]:
        return [self.leader, *self.followers.values()]

    def close(self) -> None:
        for monitor in self.monitors:
            monitor.end()
        for monitor in self.monitors:
            monitor.close()
        for line in self.lines.values():
            line.close()


def _monitor(rank: int, size: int, lines: dict[int, socket.socket]) -> Monitor:
    return Monitor(Ranks(rank, size), "here", lines, TIMEOUT_S)


@contextmanager
def _ring(size: int, silent: tuple[int, ...] = ()) -> Iterator[Ring]:
    ring = Ring(size, silent)
    try:
        for monitor in ring.monitors:
            monitor.introduce({"from": monitor.ranks.rank})
        for line in ring.lines.values():
            # A process that there is not, on a host that is not this one.
            line.write({"kind": "hello", "process": 7, "host": "there", "facts": {}})
        yield ring
    finally:
        ring.close()


def _verdict(monitor: Monitor) -> RankError:
    until(lambda: monitor.failure is not None)
    assert monitor.failure is not None
    return monitor.failure


def test_ranks_introduce_themselves_and_stay_whole() -> None:
    with _ring(3) as ring:
        peers = ring.leader.wait_for_others(5.0)
        assert {rank: peer.facts["from"] for rank, peer in peers.items()} == {1: 1, 2: 2}
        assert ring.leader.processes == {1: os.getpid(), 2: os.getpid()}
        assert ring.followers[2].wait_for_others(5.0)[0].facts == {"from": 0}
        time.sleep(2 * TIMEOUT_S)
        for monitor in ring.monitors:
            monitor.check()


def test_a_rank_that_does_not_start_is_named() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    leader = _monitor(0, 3, {1: pairs[0][0], 2: pairs[1][0]})
    Notes(pairs[0][1]).write({"kind": "hello", "process": 7, "host": "", "facts": {}})
    with pytest.raises(RankError, match=r"Rank 2 of 3 has not started within 0\.3 s"):
        leader.wait_for_others(0.3)
    leader.close()


def test_every_rank_learns_who_fell_silent() -> None:
    with _ring(3, silent=(2,)) as ring:
        errors = [_verdict(monitor) for monitor in ring.monitors]
        assert {error.rank for error in errors} == {2}
        assert len({str(error) for error in errors}) == 1
        assert "(process 7) has given no sign of life for" in str(errors[0])


def test_every_rank_learns_whose_line_was_closed() -> None:
    with _ring(3, silent=(1,)) as ring:
        ring.leader.wait_for_others(5.0)
        ring.lines[1].close()
        for monitor in ring.monitors:
            assert str(_verdict(monitor)) == (
                "Rank 1 of 3 (process 7) is gone: its line was closed"
            )


def test_an_error_is_its_ranks_own() -> None:
    with _ring(3) as ring:
        ring.leader.wait_for_others(5.0)
        ring.followers[2].report(ValueError("as it happens"))
        for monitor in ring.monitors:
            assert _verdict(monitor).rank == 2
            assert "raised ValueError: as it happens" in str(_verdict(monitor))


def test_whoever_complains_is_not_at_fault_while_another_is() -> None:
    """Rank 1's exchange fails because rank 2 stands still, and rank 1 goes for that reason."""
    with _ring(3, silent=(2,)) as ring:
        ring.leader.wait_for_others(5.0)
        assert ring.followers[1].blame(OSError("closed by peer")).rank == 2
        assert _verdict(ring.leader).rank == 2


def test_complaints_are_heard_where_nobody_is_found_at_fault() -> None:
    with _ring(3) as ring:
        ring.leader.wait_for_others(5.0)
        begin = time.monotonic()
        error = ring.followers[2].blame(OSError("no route to host"))
        assert time.monotonic() - begin < 3 * TIMEOUT_S
        assert error.rank == 2
        assert "could not exchange with the others, which are alive: no route" in str(error)
        assert str(_verdict(ring.leader)) == str(error)


def test_a_complaint_may_name_a_rank() -> None:
    with _ring(3) as ring:
        ring.leader.wait_for_others(5.0)
        assert ring.leader.blame(RankError(2, "did not come within 60 s")).rank == 2


def test_the_rank_that_is_behind_is_named() -> None:
    with _ring(3) as ring:
        ring.leader.wait_for_others(5.0)
        for rank, begun in enumerate((8, 8, 5)):
            ring.monitors[rank].progress = lambda begun=begun: begun  # type: ignore[misc]
        error = ring.leader.blame(TimeoutError("nobody came"))
        assert error.rank == 2
        assert "has begun 5 exchanges, and rank 0 waited for it in number 8" in str(error)


def test_the_first_verdict_stays() -> None:
    with _ring(2) as ring:
        ring.leader.wait_for_others(5.0)
        told: list[RankError] = []
        ring.leader.on_failure(told.append)
        first = ring.leader.report(ValueError("first"))
        assert ring.leader.report(ValueError("second")) is first
        ring.leader.on_failure(told.append)
        assert told == [first, first]
        with pytest.raises(RankError, match="first"):
            ring.leader.wait_until_ready()


def test_an_end_in_order_is_no_fault() -> None:
    with _ring(2) as ring:
        ring.leader.wait_for_others(5.0)
        ring.leader.end()
        assert ring.followers[1].wait_for_end(5.0)
        ring.followers[1].close()
        time.sleep(2 * TIMEOUT_S)
        assert ring.leader.failure is None


def test_readiness_is_waited_for() -> None:
    with _ring(3) as ring:
        for follower in ring.followers.values():
            follower.tell_ready()
        ring.leader.wait_until_ready()


def test_time_in_which_this_process_stood_still_is_nobodys_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _ring(2) as ring:
        ring.leader.wait_for_others(5.0)
        ahead = 0.0
        clock = time.monotonic
        monkeypatch.setattr("kdecode.parallel.monitor.time.monotonic", lambda: clock() + ahead)
        ahead = 100 * TIMEOUT_S
        time.sleep(2 * TIMEOUT_S)
        assert ring.leader.failure is None
        assert ring.followers[1].failure is None


def test_a_pulse_is_use_of_a_core() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        pulse = Pulse(busy.pid)
        until(pulse.beats)
        busy.send_signal(subprocess.signal.SIGSTOP)  # type: ignore[attr-defined]
        until(lambda: not pulse.beats())
        assert pulse.is_stopped
        busy.kill()
    assert not pulse.beats()
    with subprocess.Popen(["sleep", "60"]) as idle:
        pulse = Pulse(idle.pid)
        until(lambda: not pulse.beats())
        time.sleep(0.2)
        assert not pulse.beats()
        idle.kill()
