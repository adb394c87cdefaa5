"""dense_join in Triton: `common/triton_join.py: join` with the down projection."""

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
    names = ("dense_product", "mlp_delta")
    return prepare_join(problem, weights.mlp.down, buffers, names, is_push=False)
