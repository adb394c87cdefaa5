"""expert_up in Triton."""

from __future__ import annotations

from typing import Any

from kdecode.kernels.common.expert_launch import expert_input, stack_of
from kdecode.kernels.common.triton_expert_up import up_launch
from kdecode.kernels.common.triton_launch import TritonStep, refuse_plan_rows
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its experts one `ExpertStack`."""
    source = buffers[expert_input(problem.config)]
    ids, out = buffers["route_ids"], buffers["expert_product"]
    stack = stack_of(weights.mlp, buffers)
    launch = up_launch(
        problem.config, problem.arch, stack, source, ids, out, problem.expert_products
    )
    return TritonStep(launch)
