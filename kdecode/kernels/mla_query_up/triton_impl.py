"""mla_query_up in Triton: every program norms the rows that it reads, for some rows of q_b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    row_block,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_mla import refuse_plan, row_scale
from kdecode.kernels.common.triton_ops import dot_bf16, prefetch, wait_for_previous
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32 = torch.bfloat16, torch.float32

# Programs that a launch should have, so that every processor of a large GPU has one.
_PROGRAMS = 128
# Of bf16 in a line of memory.
_LINE_COLUMNS = tl.constexpr(64)


@dataclass(frozen=True)
class Tile:
    """block_n: rows of q_b a program; block_k: columns of it at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def tile(rows: int, heads_width: int, rank: int, arch: str) -> Tile:
    """The tile of a step of so many rows; q_b is [heads_width, rank]."""
    block_r = row_block(rows)
    few = block_r <= 2
    block_n = 8 if few else 16
    while block_n < 64 and divide_up(heads_width, 2 * block_n) >= _PROGRAMS:
        block_n *= 2
    most = 512 if few else 128 if block_r <= 16 else 64
    block_k = min(most, triton.next_power_of_2(rank))
    default = Tile(block_n, max(16, block_k), warps=4, stages=1 if few else 3)
    return choose("mla_query_up", arch, f"rows {block_r}, {heads_width} x {rank}", default)


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = refuse_plan(problem)
    if problem.config.mla.q_rank is None:
        reasons.append("mla_query_up is the second half of a q LoRA, which the model has none of.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla`."""
    mla, rows, attention = problem.config.mla, plan_rows(problem), weights.attention
    assert mla.q_rank is not None
    width = mla.num_heads * mla.qk_dim
    proj = buffers["mla_proj"]
    used = tile(rows, width, mla.q_rank, problem.arch)
    launch = Launch(
        kernel=query_up,
        grid=(divide_up(width, used.block_n),),
        arguments={
            "proj": tensor_for(proj, BF16, (rows, proj.shape[1]), name="mla_proj"),
            "norm": tensor_for(attention.q_norm, FP32, (mla.q_rank,), name="q_norm"),
            "weight": row_major(attention.q_b, (width, mla.q_rank), "q_b"),
            "out": tensor_for(buffers["mla_q"], BF16, (rows, width), name="mla_q"),
            "rows": rows,
        },
        constants={
            "PROJ": proj.shape[1],
            "RANK": mla.q_rank,
            "WIDTH": width,
            "EPS": mla.latent_norm_eps,
            "BLOCK_R": row_block(rows),
            "BLOCK_N": used.block_n,
            "BLOCK_K": used.block_k,
            "LINES": triton.next_power_of_2(divide_up(mla.q_rank, _LINE_COLUMNS)),
        },
        num_warps=used.warps,
        num_stages=used.stages,
        begins_early=True,
    )
    return TritonStep(launch, (weights,))


@triton.jit(do_not_specialize=["rows"])
def query_up(
    proj,
    norm,
    weight,
    out,
    rows,
    PROJ: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
):
    """proj [rows, PROJ], its first RANK columns; norm [RANK]; weight [WIDTH, RANK] ->
    out [rows, WIDTH]. One or two rows are multiplied in fp32, more by tensor cores."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_column = columns < WIDTH
    IS_DOT: tl.constexpr = BLOCK_R > 2
    LANES: tl.constexpr = max(BLOCK_R, 16) if IS_DOT else BLOCK_R
    row = tl.arange(0, LANES)
    has_row = row < rows
    early = tl.minimum(tl.arange(0, LINES) * _LINE_COLUMNS, RANK - 1)
    prefetch(weight + tl.minimum(columns, WIDTH - 1)[:, None] * RANK + early[None, :])
    wait_for_previous()

    # Few rows are read at once, whatever their length.
    BLOCK_S: tl.constexpr = BLOCK_K if IS_DOT else LINES * _LINE_COLUMNS
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, RANK, BLOCK_S):
        channel = start + tl.arange(0, BLOCK_S)
        is_query = has_row[:, None] & (channel < RANK)[None, :]
        own = tl.load(proj + row[:, None] * PROJ + channel[None, :], mask=is_query, other=0.0)
        total += tl.sum(own.to(tl.float32) * own.to(tl.float32), axis=1)
    scale = row_scale(total, RANK, EPS)

    if IS_DOT:
        acc = tl.zeros([BLOCK_N, LANES], tl.float32)
        for start in range(0, RANK, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            has_k = k < RANK
            has_w = has_column[:, None] & has_k[None, :]
            w = tl.load(weight + columns[:, None] * RANK + k[None, :], mask=has_w, other=0.0)
            has_x = has_k[:, None] & has_row[None, :]
            x = tl.load(proj + row[None, :] * PROJ + k[:, None], mask=has_x, other=0.0)
            factor = tl.load(norm + k, mask=has_k, other=0.0)
            normed = x.to(tl.float32) * scale[None, :] * factor[:, None]
            acc = dot_bf16(w, normed.to(tl.bfloat16), acc)
        mask = has_column[:, None] & has_row[None, :]
        at = row[None, :] * WIDTH + columns[:, None]
        tl.store(out + at, acc.to(tl.bfloat16), mask=mask)
    else:
        acc = tl.zeros([LANES, BLOCK_N], tl.float32)
        for start in tl.static_range(0, RANK, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            has_k = k < RANK
            has_w = has_column[:, None] & has_k[None, :]
            w = tl.load(weight + columns[:, None] * RANK + k[None, :], mask=has_w, other=0.0)
            has_x = has_row[:, None] & has_k[None, :]
            x = tl.load(proj + row[:, None] * PROJ + k[None, :], mask=has_x, other=0.0)
            factor = tl.load(norm + k, mask=has_k, other=0.0)
            normed = x.to(tl.float32) * scale[:, None] * factor[None, :]
            normed = normed.to(tl.bfloat16).to(tl.float32)
            acc += tl.sum(w.to(tl.float32)[None, :, :] * normed[:, None, :], axis=2)
        mask = has_row[:, None] & has_column[None, :]
        at = row[:, None] * WIDTH + columns[None, :]
        tl.store(out + at, acc.to(tl.bfloat16), mask=mask)
