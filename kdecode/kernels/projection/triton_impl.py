"""projection in Triton: `common/triton_projection.py` with a layer's matrix, or the head."""

from __future__ import annotations

import torch

from kdecode.kernels.common.rank_parts import place_of
from kdecode.kernels.common.triton_launch import (
    TritonStep,
    plan_rows,
    refuse_plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_projection import projection_launch
from kdecode.kernels.contract import Buffers, PartBlock, Problem
from kdecode.kernels.projection.op import ProjectionWeights


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: ProjectionWeights, buffers: Buffers) -> TritonStep:
    rows, (columns, inner) = plan_rows(problem), (weights.matrix.rows, weights.matrix.cols)
    is_part = weights.exchange == "reduce"
    dtype = torch.float32 if weights.is_head or is_part else torch.bfloat16
    source, out = buffers[weights.input], buffers[weights.output]
    launch = projection_launch(
        problem,
        tensor_for(source, torch.bfloat16, (rows, inner), name=weights.input),
        row_major(weights.matrix, (columns, inner), f"the matrix of {weights.output}"),
        tensor_for(out, dtype, (rows, columns), name=weights.output),
        buffers,
        is_rounded=not is_part,
        block=_block_of(problem, weights, buffers),
    )
    return TritonStep(launch)


def _block_of(problem: Problem, weights: ProjectionWeights, buffers: Buffers) -> PartBlock | None:
    """What the product is a part of, of several ranks."""
    if weights.exchange is None or problem.ranks.is_alone:
        return None
    return buffers.blocks[place_of(problem.config, problem.ranks.size, weights.output)]
