"""The fault drill of a group of processes: whatever happens to a rank, it is named within seconds,
and nothing of the group is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_follow
from processes import is_there, until

from kdecode.parallel import launch
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import RankError

FAULTS = {
    "kill": "died with signal 9",
    "stop": "is stopped and has given no sign of life for",
    "raise": "raised ZeroDivisionError: as the drill wants it",
}
# What an operation of `rank_follow` is called; at the end of this one all wait for the next.
IDLE = "fault"
IN_MEMORY = "fault while all exchange in memory"
TIMEOUT_S = 2.0
LIMIT_S = 60.0
LEADER = Path(__file__).with_name("leader_process.py")


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        ("kill", IDLE),
        ("kill", "fault while all exchange"),
        ("stop", "fault while all exchange"),
        ("raise", "fault while all exchange"),
        ("kill", IN_MEMORY),
        ("stop", IN_MEMORY),
    ],
)
def test_a_follower_of_two_is_named(fault: str, when: str) -> None:
    _drill(2, 1, fault, when)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (4, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "when", [IDLE, "fault while all exchange", IN_MEMORY, "fault while others compute"]
)
def test_each_follower_is_named_whatever_happens_to_it(
    size: int, rank: int, fault: str, when: str
) -> None:
    _drill(size, rank, fault, when)


def _drill(size: int, rank: int, fault: str, when: str) -> None:
    group = launch.start(size, rank_follow.follow, timeout_s=TIMEOUT_S, part_bytes=4096)
    try:
        group.wait_until_ready()
        processes = dict(group.processes)
        begin = time.monotonic()
        with pytest.raises(RankError) as raised:
            _let_it_happen(group, when, rank, fault)
        assert raised.value.rank == rank
        assert str(raised.value).startswith(
            f"Rank {rank} of {size} (process {processes[rank]}) {FAULTS[fault]}"
        )
        with pytest.raises(RankError) as again:
            group.send(("reduce", 1, 1))
        assert again.value is raised.value
    finally:
        group.close()
    assert time.monotonic() - begin < LIMIT_S
    assert not any(is_there(process) for process in processes.values())


def _let_it_happen(group: Group, when: str, rank: int, fault: str) -> None:
    group.send((when, rank, fault))
    rank_follow.carry_out(group, when, rank, fault)
    # Of a rank that waits for operations nobody learns by an exchange.
    until(lambda: group.check() is not None)


def test_a_rank_that_fails_while_it_builds_is_named() -> None:
    group = launch.start(2, rank_follow.fail_while_building, timeout_s=TIMEOUT_S)
    with pytest.raises(RankError, match="raised ValueError: no such share"):
        group.wait_until_ready()
    group.close()


def test_a_rank_that_dies_while_it_starts_is_named() -> None:
    """What it is to do cannot be imported, as where a script does not guard its main part."""
    with pytest.raises(RankError, match=r"Rank [12] of 3 exited with code 1"):
        launch.start(3, rank_follow.Missing(), timeout_s=TIMEOUT_S)


def test_followers_end_with_rank_0() -> None:
    _end_rank_0(2, "exchanges", signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("doing", ["nothing", "exchanges"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_followers_end_with_rank_0_however_it_ends(
    size: int, doing: str, end: signal.Signals
) -> None:
    _end_rank_0(size, doing, end)


def _end_rank_0(size: int, doing: str, end: signal.Signals) -> None:
    with _leader(size, doing) as leader:
        processes = _told(leader)
        leader.send_signal(end)
        leader.wait(LIMIT_S)
        until(lambda: not any(is_there(process) for process in processes))


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["nothing", "exchanges"])
def test_followers_end_where_rank_0_stands_still(doing: str) -> None:
    with _leader(2, doing) as leader:
        processes = _told(leader)
        leader.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        # Their parent cannot collect them as long as it is stopped.
        until(lambda: not any(is_there(process, or_zombie=False) for process in processes))
        assert time.monotonic() - begin < LIMIT_S
        leader.send_signal(signal.SIGCONT)
        _, text = leader.communicate(timeout=LIMIT_S)
        assert "Rank 1 of 2" in text
        assert "has left: Rank 0 of 2" in text
    assert leader.returncode == 1
    assert not any(is_there(process) for process in processes)


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["raises", "leaves"])
def test_followers_end_where_rank_0_raises_or_does_not_close_the_group(doing: str) -> None:
    with _leader(2, doing) as leader:
        processes = _told(leader)
        begin = time.monotonic()
        leader.communicate(timeout=LIMIT_S)
        assert time.monotonic() - begin < LIMIT_S
    assert leader.returncode == (1 if doing == "raises" else 0)
    assert not any(is_there(process) for process in processes)


@pytest.mark.slow
def test_an_interrupt_from_the_terminal_is_for_rank_0() -> None:
    """All processes of a terminal get it; followers work on until rank 0 ends them."""
    with _leader(2, "catches an interrupt", start_new_session=True) as leader:
        _told(leader)
        os.killpg(leader.pid, signal.SIGINT)
        told, text = leader.communicate(timeout=LIMIT_S)
        assert "interrupted, and exchanged once more" in told, text
    assert leader.returncode == 0


def _leader(size: int, doing: str, *, start_new_session: bool = False) -> subprocess.Popen[str]:
    """A process that is rank 0 of a group. Told by its first line: the processes of the others."""
    return subprocess.Popen(
        [sys.executable, str(LEADER), str(size), str(TIMEOUT_S), doing],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def _told(leader: subprocess.Popen[str]) -> list[int]:
    assert leader.stdout is not None
    line = leader.stdout.readline()
    assert line, leader.communicate()[1]
    processes: list[int] = json.loads(line)
    return processes
