"""What the launches of a draft's round cost on a GPU, by the device's own clock.

As `inspect_device` times a plan: by graphs that grow by a launch and are replayed with cold
weights. Here over a greedy round of one request, as its draft launches it: the block, the choices,
and what caches the round's committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.decode.draft_device import CudaDraft
from kdecode.decode.draft_standard import ContextRows, DraftRequest
from kdecode.decode.inspect import PlanCost, StepCost
from kdecode.decode.inspect_device import DevicePlanProbe
from kdecode.decode.plan import Step
from kdecode.kernels.contract import Buffers


@dataclass(frozen=True)
class RoundCost:
    """block: up to the logits of all rows. choices: of the drafts, and what is expected of them.
    append: of as many committed tokens as the block has rows, and one."""

    block: PlanCost
    choices: tuple[StepCost, ...]
    append: tuple[StepCost, ...]


def time_round(
    draft: CudaDraft, request: DraftRequest, taps: Tensor, runs: int, seen_tokens: int
) -> RoundCost:
    """taps: of the committed tokens. seen_tokens: of the request's context, for the bytes read."""
    plan = draft.load([request])
    (program,) = draft.load_passes([ContextRows(request.num_tokens, request.pages, taps)])
    each = plan.rows_per_request
    launched: Any = _Round(
        plan.backend, plan.config, each, (*plan.steps, *program.steps), plan.buffers
    )
    probe = _RoundProbe(draft.stack, launched, draft.caches, each, seen_tokens, 1, each)
    cost = probe.measure(runs)
    choices, append = draft.num_steps, len(plan.steps)
    block = replace(
        cost,
        context_tokens=request.num_tokens,
        steps=cost.steps[:choices],
        plan_microseconds=microseconds(cost.steps[:choices]),
    )
    return RoundCost(block, cost.steps[choices:append], cost.steps[append:])


def microseconds(steps: Sequence[StepCost]) -> float:
    return sum(step.microseconds for step in steps)


@dataclass(frozen=True)
class _Round:
    """What a probe asks of a plan; these steps are more than one."""

    backend: str
    config: ModelConfig
    rows: int
    steps: tuple[Step, ...]
    buffers: Buffers


class _RoundProbe(DevicePlanProbe):
    """Of launches whose inputs are there."""

    def _load(self) -> None:
        pass
