"""Faults of one rank in the middle of a step, in the process that has them.

Imported by those processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_follow import commit

from kdecode.config import EngineConfig
from kdecode.decode import runner
from kdecode.decode.runner import StepRunner
from kdecode.engine.follower import follow
from kdecode.engine.operations import describe
from kdecode.parallel.group import Group


@dataclass(frozen=True)
class Fault:
    """kind: "kill", "stop" or "diverge". phase: of the step, "prefill", "decode" or "verify".

    stamp: a file for the time at which it happened; none if empty.
    """

    rank: int
    kind: str
    phase: str
    stamp: str = ""

    def happens(self) -> None:
        """The clock is the same in every process of a machine."""
        if self.stamp:
            Path(self.stamp).write_text(str(time.monotonic()))


def follow_until(fault: Fault, group: Group, directory: Path, engine: EngineConfig) -> None:
    """A follower that may have the fault."""
    if group.ranks.rank == fault.rank:
        arm(fault)
    follow(group, directory, engine)


def follow_until_recorded(kind: str, group: Group, directory: Path, engine: EngineConfig) -> None:
    """A follower that has the fault while its standard steps are recorded."""
    arm_recording(kind)
    follow(group, directory, engine)


def arm_recording(kind: str) -> None:
    """This process has the fault when it comes to the second number of rows that is recorded."""
    record, recorded = runner.record, []

    def faulty(*args: Any) -> Any:
        if recorded:
            commit(kind)
        recorded.append(args)
        return record(*args)

    runner.record = faulty


def arm(fault: Fault) -> None:
    """This process has the fault in its first step of that phase, half way through the layers."""
    run, launch = StepRunner._run, StepRunner._launch
    is_due = False

    def faulty_run(self: StepRunner, batch: Any) -> Any:
        nonlocal is_due
        is_due = describe(batch).startswith(fault.phase)
        return run(self, batch)

    def faulty_launch(self: StepRunner, plan: Any) -> None:
        if is_due and fault.kind != "diverge":
            if plan.launched_as != "CUDA graphs":  # which have no half
                plan.run_range(0, len(plan.steps) // 2)
            fault.happens()
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        launch(self, plan)
        if is_due and fault.kind == "diverge":
            fault.happens()
            plan.buffers["prefix"] += 1

    StepRunner._run, StepRunner._launch = faulty_run, faulty_launch  # type: ignore[method-assign]
