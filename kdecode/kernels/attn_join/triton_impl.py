"""attn_join in Triton: `common/triton_join.py: join` with o_proj and the push of a snapshot."""

from __future__ import annotations

from typing import Any

from kdecode.kernels.common.triton_join import prepare_join
from kdecode.kernels.common.triton_launch import TritonStep, refuse_plan_rows
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` with matrices in "rows"."""
    assert problem.layer is not None
    is_push = problem.config.is_snapshot_layer(problem.layer)
    names = ("attn_out", "attn_delta")
    return prepare_join(problem, weights.attention.o_proj, buffers, names, is_push=is_push)
