"""How a block of a CUDA plan ends: a product, the residual, and of few rows the next mix and norm.

`join` is the launch of a block that ends in one product; what it shares with moe_join, which has
two, are the device functions above it and `JoinPlan`. Knows no op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.common.triton_launch import Launch, TritonStep, divide_up, tensor_for
from kdecode.kernels.common.triton_mix import mix_arguments, mix_norm_row, score_snapshot
from kdecode.kernels.common.triton_ops import is_last_arrival, to_bf16
from kdecode.kernels.common.triton_product import ProductTile, product, product_rows, product_tile
from kdecode.kernels.contract import Buffers, Problem

BF16 = torch.bfloat16
MAX_ROWS = 64


@triton.jit
def add_residual(
    delta,
    n,
    rows,
    delta_out,
    prefix,
    pushed,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PUSH: tl.constexpr,
):
    """delta [BLOCK_N, BLOCK_R] bf16 of columns n to its buffer and into the prefix.

    With PUSH the old prefix goes to ``pushed``, and a new one starts from delta.
    """
    r = tl.arange(0, BLOCK_R)[None, :]
    at = r * WIDTH + n[:, None]
    inside = (r < rows) & (n < WIDTH)[:, None]
    tl.store(delta_out + at, delta, mask=inside)
    old = tl.load(prefix + at, mask=inside, other=0.0)
    if PUSH:
        tl.store(pushed + at, old, mask=inside)
        tl.store(prefix + at, delta, mask=inside)
    else:
        summed = old.to(tl.float32) + delta.to(tl.float32)
        tl.store(prefix + at, to_bf16(summed), mask=inside)


@triton.jit
def finish_rows(
    counter,
    rows,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    scores,
    mix_out,
    norm_out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    MAX_SNAPSHOTS: tl.constexpr,
    PUSH: tl.constexpr,
):
    """The mix and norm of all rows, by the last program of the launch that comes here.

    With PUSH the last snapshot is of this launch, and is scored only now.
    """
    if is_last_arrival(counter, tl.num_programs(0)):
        for row in range(rows):
            if PUSH and SNAPSHOTS > 0:
                score_snapshot(
                    row,
                    SNAPSHOTS - 1,
                    rows,
                    snapshots,
                    mix_weight,
                    scores,
                    eps,
                    WIDTH,
                    BLOCK_WIDTH,
                    MAX_SNAPSHOTS,
                )
                tl.debug_barrier()
            mix_norm_row(
                row,
                rows,
                prefix,
                snapshots,
                mix_weight,
                norm_weight,
                scores,
                mix_out,
                norm_out,
                eps,
                WIDTH,
                BLOCK_WIDTH,
                SNAPSHOTS,
                MAX_SNAPSHOTS,
            )


@triton.jit(do_not_specialize=["rows"])
def join(
    x,
    weight,
    delta_out,
    prefix,
    pushed,
    snapshots,
    mix_weight,
    norm_weight,
    scores,
    mix_out,
    norm_out,
    counter,
    eps,
    rows,
    SCORED: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PUSH: tl.constexpr,
    FUSED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    MAX_SNAPSHOTS: tl.constexpr,
):
    """delta = bf16(x W^T) and the residual. The first rows * SCORED programs score snapshots."""
    program = tl.program_id(0)
    block = program - rows * SCORED
    if block < 0:
        score_snapshot(
            program % rows,
            program // rows,
            rows,
            snapshots,
            mix_weight,
            scores,
            eps,
            WIDTH,
            BLOCK_WIDTH,
            MAX_SNAPSHOTS,
        )
    else:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        held = tl.minimum(n, WIDTH - 1)
        acc = product(
            x, weight, x, eps, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False
        )
        delta = to_bf16(acc)
        add_residual(delta, n, rows, delta_out, prefix, pushed, WIDTH, BLOCK_R, PUSH)
    if FUSED:
        finish_rows(
            counter,
            rows,
            prefix,
            snapshots,
            mix_weight,
            norm_weight,
            scores,
            mix_out,
            norm_out,
            eps,
            WIDTH,
            BLOCK_WIDTH,
            SNAPSHOTS,
            MAX_SNAPSHOTS,
            PUSH,
        )


@dataclass(frozen=True)
class JoinPlan:
    """What every launch that ends a block binds beside its products.

    programs: of a grid whose products take ``blocks``.
    """

    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, Any]
    programs: int


def plan_join(
    problem: Problem, then: MixNorm | None, buffers: Buffers, tile: ProductTile, *, is_push: bool
) -> JoinPlan:
    """The residual's and the mix's share of a launch. then: None where it does no mix."""
    config, rows = problem.config, plan_rows(problem)
    width = config.hidden_size
    prefix = tensor_for(buffers["prefix"], BF16, (rows, width), name="prefix")
    pushed = prefix  # not written
    if is_push:
        assert problem.layer is not None
        pushed = buffers["snapshots"][config.snapshots_before(problem.layer)]
        tensor_for(pushed, BF16, (rows, width), name="the pushed snapshot")
    arguments: dict[str, Tensor | int | float]
    if then is None:
        unused = dict.fromkeys(
            ("snapshots", "mix_weight", "norm_weight", "scores", "mix_out", "norm_out", "counter"),
            prefix,
        )
        arguments = {"prefix": prefix, "eps": config.rms_eps, **unused}
        constants = {"WIDTH": width, "BLOCK_WIDTH": 1, "SNAPSHOTS": 0, "MAX_SNAPSHOTS": 1}
        scored = 0
    else:
        arguments, constants = mix_arguments(config, rows, then, buffers)
        arguments["counter"] = buffers.counters(1)
        scored = then.num_snapshots - int(is_push and then.num_snapshots > 0)
    constants |= {
        "SCORED": scored,
        "PUSH": is_push,
        "FUSED": then is not None,
        "BLOCK_R": product_rows(rows),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    blocks = divide_up(width, tile.block_n)
    return JoinPlan(
        {**arguments, "pushed": pushed, "rows": rows}, constants, blocks + rows * scored
    )


def prepare_join(
    problem: Problem,
    matrix: Matrix,
    then: MixNorm | None,
    buffers: Buffers,
    *,
    names: tuple[str, str],
    is_push: bool,
) -> TritonStep:
    """The launch of one product. names: the buffers of its input and of its output."""
    rows, (width, inner) = plan_rows(problem), (matrix.rows, matrix.cols)
    tile = product_tile("join", problem.arch, rows, width, inner)
    plan = plan_join(problem, then, buffers, tile, is_push=is_push)
    arguments = {
        **plan.arguments,
        "x": tensor_for(buffers[names[0]], BF16, (rows, inner), name=names[0]),
        "weight": row_major(matrix, (problem.config.hidden_size, inner), "the output projection"),
        "delta_out": tensor_for(buffers[names[1]], BF16, (rows, width), name=names[1]),
    }
    constants = {**plan.constants, "INNER": inner}
    launch = Launch(join, (plan.programs,), arguments, constants, tile.warps, tile.stages)
    return TritonStep(launch)


def row_major(matrix: Matrix, shape: tuple[int, int], name: str) -> Tensor:
    """The data of a bf16 matrix in format "rows" of a known size."""
    if matrix.format != "rows":
        raise ValueError(f"{name} is in {matrix.format}; the CUDA kernels read rows of bf16.")
    return tensor_for(matrix.data, BF16, shape, name=name)


def plan_rows(problem: Problem) -> int:
    """The rows of a step that has been accepted; ValueError for a plan of any number of rows."""
    reasons = refuse_plan_rows(problem)
    if problem.rows is None or reasons:
        raise ValueError(" ".join(reasons))
    return problem.rows


def refuse_plan_rows(problem: Problem) -> list[str]:
    """Reasons that concern the number of rows."""
    if problem.rows is None:
        return ["The steps of a CUDA plan are built for a fixed number of rows."]
    if not 1 <= problem.rows <= MAX_ROWS:
        return [f"The steps of a CUDA plan take 1 to {MAX_ROWS} rows; this has {problem.rows}."]
    return []
