"""The fault drill end to end: whatever happens to a rank in a step, its requests end with an error
that names it, within seconds, and nothing of the engine is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from engine_faults import Fault, follow_until
from processes import is_there, until
from ranked_engines import PROMPTS, build, greedy, names_left, with_draft

from kdecode.parallel.ranks import RankError

LIMIT_S = 60.0
PROGRAM = Path(__file__).with_name("engine_process.py")
WORDS = {
    "kill": "died with signal 9",
    "stop": "is stopped and has given no sign of life for",
    "diverge": "diverged: the digests of what each rank was told and has",
}
BACKENDS = ("auto", "latency_specialized")
PHASES = ("prefill", "decode", "verify")
QUICK = [
    ("latency_specialized", 2, Fault(1, "kill", "decode")),
    ("latency_specialized", 2, Fault(1, "stop", "verify")),
    ("auto", 2, Fault(1, "diverge", "prefill")),
]


@pytest.mark.parametrize(("backend", "size", "fault"), QUICK)
def test_a_follower_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mini_16_checkpoint: Path,
    backend: str,
    size: int,
    fault: Fault,
) -> None:
    _drill(monkeypatch, tmp_path, mini_16_checkpoint, backend, size, fault)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_follower_is_named_in_each_phase(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mini_16_checkpoint: Path,
    backend: str,
    kind: str,
    phase: str,
    rank: int,
) -> None:
    _drill(monkeypatch, tmp_path, mini_16_checkpoint, backend, 4, Fault(rank, kind, phase))


def _drill(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    checkpoint: Path,
    backend: str,
    size: int,
    fault: Fault,
) -> None:
    stamp = folder / "stamp"
    fault = replace(fault, stamp=str(stamp))
    monkeypatch.setattr("kdecode.engine.leader.follow", partial(follow_until, fault))
    draft = with_draft(checkpoint) if fault.phase == "verify" else None
    with build(checkpoint, backend, size, speculative=draft) as llm:
        leader = llm._worker.leader
        assert leader is not None
        processes = dict(leader.processes)
        outputs = llm.generate(PROMPTS, greedy())
        assert time.monotonic() - float(stamp.read_text()) < LIMIT_S
        # Every request ended with it, those that had not begun, too.
        for output in outputs:
            assert output.finish_reason == "error"
            assert output.error is not None
            named = f"RankError: Rank {fault.rank} of {size} (process {processes[fault.rank]})"
            assert output.error.startswith(f"{named} {WORDS[fault.kind]}")
            assert f" during step {leader.num_steps} ({fault.phase}, " in output.error
        assert not any(is_there(process) for process in processes.values())
        # It stays broken, at once and by the same name.
        (late,) = llm.generate([PROMPTS[0]], greedy())
        assert late.error == outputs[0].error
        with pytest.raises(RankError, match=f"Rank {fault.rank} of {size}"):
            llm.check_ranks()
        assert llm.stats()["slots_used"] == llm.stats()["pages_used"] == 0
    assert not names_left((*processes.values(), os.getpid()))


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("kill", "decode"),
        *(
            pytest.param(kind, phase, marks=pytest.mark.slow)
            for kind in WORDS
            for phase in PHASES
            if (kind, phase) != ("kill", "decode")
        ),
    ],
)
def test_followers_do_not_outlive_rank_0(
    tmp_path: Path, mini_16_checkpoint: Path, kind: str, phase: str
) -> None:
    stamp = tmp_path / "stamp"
    # Of two ranks that differ nobody knows which one is right.
    size = "4" if kind == "diverge" else "2"
    command = [sys.executable, str(PROGRAM), str(mini_16_checkpoint), "latency_specialized", size]
    with subprocess.Popen(
        [*command, kind, phase, str(stamp)], stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            processes = json.loads(run.stdout.readline())
            # A busy machine takes its time for the steps before.
            until(stamp.exists, LIMIT_S)
            begin = time.monotonic()
            if kind != "diverge":
                # A stopped parent cannot collect them.
                until(lambda: not any(is_there(one, or_zombie=False) for one in processes))
            if kind == "stop":
                run.send_signal(signal.SIGCONT)
            text, _ = run.communicate(timeout=LIMIT_S)
            assert time.monotonic() - begin < LIMIT_S
        finally:
            run.kill()
    until(lambda: not any(is_there(process) for process in processes))
    assert not names_left((*processes, run.pid))
    if kind == "kill":
        assert run.returncode == -signal.SIGKILL
        return
    named = "RankError: Rank 0 of 4" if kind == "diverge" else "RankError: Rank "
    assert all(error.startswith(named) for error in json.loads(text))
