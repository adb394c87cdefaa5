"""embed_norm in Triton, a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    plan_rows,
    refuse_plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_mix import mix_arguments, mix_norm_row
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.embed_norm.op import EmbedWeights

_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: EmbedWeights, buffers: Buffers) -> TritonStep:
    config, rows = problem.config, plan_rows(problem)
    if weights.then.num_snapshots:
        raise ValueError(
            f"{weights.then.num_snapshots} snapshots before the first layer; none exists there."
        )
    shape = (config.vocab_size, config.hidden_size)
    arguments, constants = mix_arguments(config, rows, weights.then, buffers)
    arguments |= {
        "table": tensor_for(weights.table, torch.bfloat16, shape, name="the embedding"),
        "row_token": tensor_for(buffers["row_token"], torch.int32, (rows,), name="row_token"),
        "rows": rows,
    }
    constants |= {"VOCAB": config.vocab_size}
    return TritonStep(Launch(embed_norm, (rows,), arguments, constants, num_warps=_WARPS))


@triton.jit(do_not_specialize=["rows"])
def embed_norm(
    table,
    row_token,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    rows,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(row_token + row)
    is_known = (token >= 0) & (token < VOCAB)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH
    line = table + token.to(tl.int64) * WIDTH + columns
    x = tl.load(line, mask=inside & is_known, other=float("nan"))
    tl.store(prefix + row * WIDTH + columns, x, mask=inside)
    tl.debug_barrier()
    mix_norm_row(
        row,
        rows,
        prefix,
        snapshots,
        mix_weight,
        norm_weight,
        mix_out,
        norm_out,
        eps,
        WIDTH,
        BLOCK_WIDTH,
        SNAPSHOTS,
        BLOCK_S,
        False,
    )
