"""expert_down in Triton."""

from __future__ import annotations

from typing import Any

from kdecode.kernels.common.expert_launch import expert_side, stack_of
from kdecode.kernels.common.triton_expert_down import (
    Choice,
    Gathering,
    down_launch,
    is_grouped,
    num_counters,
)
from kdecode.kernels.common.triton_launch import (
    TritonStep,
    plan_rows,
    refuse_plan_rows,
    row_major,
)
from kdecode.kernels.common.triton_peers import signal_of
from kdecode.kernels.common.triton_shared_down import SharedDown
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its experts one `ExpertStack`."""
    config, rows = problem.config, plan_rows(problem)
    # Of several ranks the sums are parts, and what they are made of is not rounded.
    is_alone = problem.ranks.is_alone
    out = buffers["expert_sum" if is_alone else "expert_part"]
    gathering = None
    if is_grouped(rows):
        shape = (rows, config.moe.top_k, expert_side(config))
        outputs = buffers.scratch("expert_outputs", shape, out.dtype)
        gathering = Gathering(outputs, buffers.counters(num_counters(config)))
    launch = down_launch(
        config,
        problem.arch,
        stack_of(weights.mlp, buffers),
        buffers["expert_product"],
        Choice(buffers["route_ids"], buffers["route_weights"]),
        out,
        gathering,
        buffers.get("expert_squares") if is_alone else None,
        None if is_alone else _shared(problem, weights.mlp, buffers),
        None if is_alone else signal_of(buffers.blocks["experts"], buffers, out),
        problem.expert_products,
    )
    return TritonStep(launch)


def _shared(problem: Problem, mixture: Any, buffers: Buffers) -> SharedDown | None:
    """The shared experts' part, where the model has them."""
    shape = problem.config.hidden_size, problem.config.moe.shared_width
    if mixture.shared is None:
        return None
    weight = row_major(mixture.shared.down, shape, "the shared down matrix")
    return SharedDown(buffers["shared_product"], weight, buffers["shared_part"])
