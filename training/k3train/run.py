"""What both trainings share: a folder with a resumable state, and a log that is kept.

A state is written to a new file that replaces the old one, so that a stopped training goes on from
its last state. Every random choice is a function of the seed and the step, not of what ran before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from k3train.optimiser import Optimiser, rate_at


class Learner(Protocol):
    """A model in training: its parameters are the optimiser's, its losses are for the log."""

    def state(self) -> dict[str, torch.Tensor]: ...

    def load(self, state: dict[str, torch.Tensor]) -> None: ...

    def step(self, step: int) -> dict[str, float]:
        """Gradients of the batch of this step; -> figures for the log."""

    def held_out(self) -> dict[str, float]:
        """Figures on held-out text."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. save_seconds: between two states on disk."""

    steps: int
    peak_rate: float
    warm_up: int = 60
    decay_share: float = 0.3
    held_out_every: int = 50
    save_seconds: float = 120.0


def train(
    learner: Learner,
    optimiser: Optimiser,
    schedule: Schedule,
    state_file: Path,
    log_file: Path,
    *,
    minutes: float | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Trains from the last state to the last step; False where ``minutes`` ended it before."""
    first = resume(learner, optimiser, state_file)
    started = saved = time.monotonic()
    with log_file.open("a", encoding="utf-8") as log:
        for step in range(first, schedule.steps):
            began = time.monotonic()
            rate = rate_at(
                step, schedule.steps, schedule.peak_rate, schedule.warm_up, schedule.decay_share
            )
            entry: dict[str, Any] = {"step": step, "rate": round(rate, 7)}
            entry |= learner.step(step)
            entry["gradient_norm"] = optimiser.step(rate)
            entry["seconds"] = time.monotonic() - began
            is_last = step + 1 == schedule.steps
            if (step + 1) % schedule.held_out_every == 0 or is_last:
                entry |= learner.held_out()
            log.write(json.dumps({k: _short(v) for k, v in entry.items()}) + "\n")
            log.flush()
            say(" ".join(f"{name}={_short(value)}" for name, value in entry.items()))
            now = time.monotonic()
            is_over = minutes is not None and now - started > 60 * minutes
            if is_last or is_over or now - saved > schedule.save_seconds:
                save(learner, optimiser, step + 1, state_file)
                saved = now
            if is_over and not is_last:
                return False
    return True


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def resume(learner: Learner, optimiser: Optimiser, state_file: Path) -> int:
    """Loads the state, if there is one; -> the next step."""
    if not state_file.exists():
        return 0
    state = torch.load(state_file, weights_only=True, map_location="cpu")
    learner.load(state["learner"])
    optimiser.load(state["optimiser"])
    return int(state["step"])


def save(learner: Learner, optimiser: Optimiser, step: int, state_file: Path) -> None:
    partial = state_file.with_suffix(".partial")
    state = {"learner": learner.state(), "optimiser": optimiser.state(), "step": step}
    torch.save(state, partial)
    os.replace(partial, state_file)
