"""experts in Triton, for any number of rows: grouped by expert on the device, nothing waits.

Up to 64 rows take the launches of a CUDA plan, more the tiles of sorted pairs. Nothing is read on
the host, so a run can be recorded in a CUDA graph. Of several ranks each has some columns of every
expert: its weighted sums are one part of theirs, no expert's output is rounded on its own, and any
number of rows takes the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.expert_launch import expert_input, expert_side
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.triton_expert_down import (
    Choice,
    Gathering,
    down_launch,
    is_grouped,
    num_counters,
)
from kdecode.kernels.common.triton_expert_tiles import tile_launches
from kdecode.kernels.common.triton_expert_up import up_launch
from kdecode.kernels.common.triton_launch import ROW_BLOCKS
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.rank_mixture import MixtureEnd, make_mixture_end

_MOST_PLAN_ROWS = ROW_BLOCKS[-1]


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed mixture of experts, in one block."""
    counters = torch.zeros(
        num_counters(problem.config), dtype=torch.int32, device=weights.router_bias.device
    )
    stack = ExpertStack.of(weights.experts)
    bound = problem.config, problem.arch, stack, counters, buffers
    end = make_mixture_end(weights, problem, buffers)
    return _Experts(*bound) if end is None else _PartExperts(*bound, end)


@dataclass(frozen=True)
class _Experts:
    config: ModelConfig
    arch: str
    stack: ExpertStack
    counters: Tensor  # zero between runs
    buffers: Buffers

    def run(self) -> None:
        source = self.buffers[expert_input(self.config)]
        choice = Choice(self.buffers["route_ids"], self.buffers["route_weights"])
        out = torch.empty_like(source)
        if source.shape[0] > _MOST_PLAN_ROWS:
            launches = tile_launches(self.config, self.arch, self.stack, source, choice, out)
            for launch in launches:
                launch.run()
        elif source.shape[0]:
            self._run_few(source, choice, out)
        self.buffers["expert_sum"] = out

    def _run_few(self, source: Tensor, choice: Choice, out: Tensor) -> None:
        config, rows = self.config, source.shape[0]
        slots = (rows, config.moe.top_k)
        product = source.new_empty(*slots, config.moe.expert_width)
        gathering = None
        if is_grouped(rows):
            gathering = Gathering(source.new_empty(*slots, expert_side(config)), self.counters)
        up_launch(config, self.arch, self.stack, source, choice.ids, product).run()
        down_launch(config, self.arch, self.stack, product, choice, out, gathering).run()


@dataclass(frozen=True)
class _PartExperts(_Experts):
    end: MixtureEnd

    def run(self) -> None:
        source = self.buffers[expert_input(self.config)]
        choice = Choice(self.buffers["route_ids"], self.buffers["route_weights"])
        part = torch.empty_like(source, dtype=torch.float32)
        if source.shape[0]:
            for launch in tile_launches(self.config, self.arch, self.stack, source, choice, part):
                launch.run()
        self.end.run(part)
