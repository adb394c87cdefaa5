"""What a draft reads of a step of the target: rows of some layers, taken while a plan runs.

A tap after layer l is the running ``prefix``, or what layer l + 1's residual mix makes of it
(`attn_mix`, after the last layer `final_mix`). Both are buffers of every backend's plan, so a run
with taps is the plan's own run, stopped behind the steps that wrote them. Knows no drafts' maths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kdecode.config_draft import DraftConfig
from kdecode.decode.plan import DecodePlan


@dataclass(frozen=True)
class Taps:
    """points: (step, buffer to read once it has run), one a tap, in the order of the layers."""

    points: tuple[tuple[int, str], ...]

    @staticmethod
    def of(plan: DecodePlan, draft: DraftConfig) -> Taps:
        return Taps(tuple(_points(plan, draft)))

    def ranges(self, plan: DecodePlan) -> list[tuple[int, int]]:
        """The ranges of steps, begin .. end - 1, that `run` launches."""
        ends = sorted({0, len(plan.steps), *(step + 1 for step, _ in self.points)})
        return list(pairwise(ends))

    def run(self, plan: DecodePlan) -> Tensor:
        """Runs the plan once; [R, taps, M] bf16, a row for each of the step's."""
        rows = []
        for begin, end in self.ranges(plan):
            plan.run_range(begin, end)
            rows += [plan.buffers[name].clone() for step, name in self.points if step + 1 == end]
        return torch.stack(rows, dim=1)


def _points(plan: DecodePlan, draft: DraftConfig) -> Iterator[tuple[int, str]]:
    step_of = {stage: index for index, step in enumerate(plan.steps) for stage in step.stages}
    for layer in draft.taps:
        if draft.tap_stream == "prefix":
            yield step_of[layer, "mlp_residual"], "prefix"
        elif layer + 1 < plan.config.num_layers:
            yield step_of[layer + 1, "attn_mix"], "attn_mix"
        else:
            yield step_of[None, "final_mix"], "final_mix"
