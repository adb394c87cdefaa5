"""mla_value in Triton: a program has some latent channels of one head, for a few rows.

It adds up their splits and multiplies them by its columns of W_UV; the last program of a head adds
up these products in the order of the channels, and gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.mla_splits import max_splits
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
from kdecode.kernels.common.triton_mla import refuse_plan, split_length
from kdecode.kernels.common.triton_ops import (
    dot_bf16,
    is_last_arrival,
    sigmoid,
    wait_for_previous,
)
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

_PROGRAMS = 96


@dataclass(frozen=True)
class Tile:
    """block_r: rows a program; block_k: latent channels; block_s: splits at a time."""

    block_r: int
    block_k: int
    block_s: int
    warps: int


def tile(rows: int, heads: int, kv_rank: int, arch: str) -> Tile:
    """The tile of a step of so many rows."""
    rows = row_block(rows)
    # Few rows where each has many splits to be added up, or a program would read for too long.
    block_r = 1 if rows == 1 else 2 if rows <= 8 else 16
    block_k = 128
    while (
        block_k > 32 and heads * divide_up(rows, block_r) * divide_up(kv_rank, block_k) < _PROGRAMS
    ):
        block_k //= 2
    block_k = min(block_k, max(16, triton.next_power_of_2(kv_rank)))
    # Up to 64 sums a thread are on their way at a time.
    block_s = max(1, min(64, 8192 // (block_r * block_k)))
    default = Tile(block_r, block_k, min(block_s, max_splits(rows)), warps=4)
    return choose("mla_value", arch, f"rows {rows}, {heads} x {kv_rank}", default)


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla`."""
    mla, rows, attention = problem.config.mla, plan_rows(problem), weights.attention
    heads, proj, splits = mla.num_heads, buffers["mla_proj"], max_splits(rows)
    width = heads * mla.v_dim
    gate_at = (heads * mla.qk_dim if mla.q_rank is None else mla.q_rank) + mla.cache_width
    used = tile(rows, heads, mla.kv_rank, problem.arch)
    parts, row_blocks = divide_up(mla.kv_rank, used.block_k), divide_up(rows, used.block_r)
    split_shape = (rows, splits, heads)
    products = buffers.scratch("mla_value_parts", (rows, parts, width), FP32)
    counters = buffers.counters(row_blocks * heads)
    launch = Launch(
        kernel=value_gate,
        grid=(heads * parts, row_blocks),
        arguments={
            "sums": tensor_for(
                buffers["mla_split_sums"], FP32, (*split_shape, mla.kv_rank), name="mla_split_sums"
            ),
            "stats": tensor_for(
                buffers["mla_split_stats"], FP32, (*split_shape, 2), name="mla_split_stats"
            ),
            "proj": tensor_for(proj, BF16, (rows, proj.shape[1]), name="mla_proj"),
            "row_position": tensor_for(
                buffers["row_position"], INT32, (rows,), name="row_position"
            ),
            "w_uv": row_major(attention.w_uv, (width, mla.kv_rank), "W_UV"),
            "latents": tensor_for(
                buffers["mla_latent"], BF16, (rows, heads, mla.kv_rank), name="mla_latent"
            ),
            "products": products,
            "counters": counters,
            "out": tensor_for(buffers["attn_out"], BF16, (rows, width), name="attn_out"),
            "rows": rows,
        },
        constants={
            "EACH": problem.rows_per_request,
            "PROJ": proj.shape[1],
            "GATE_AT": gate_at,
            "HAS_GATE": mla.has_output_gate,
            "HEADS": heads,
            "LATENT": mla.kv_rank,
            "VALUE": mla.v_dim,
            "SPLITS": splits,
            "BLOCK_R": used.block_r,
            "BLOCK_K": used.block_k,
            "BLOCK_S": used.block_s,
            "VALUE_BLOCK": max(16, triton.next_power_of_2(mla.v_dim)),
        },
        num_warps=used.warps,
        num_stages=2,
        begins_early=True,
    )
    return TritonStep(launch, (weights,))


@triton.jit
def _merged(
    sums,
    stats,
    row,
    channel,
    has_channel,
    count,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The latents [BLOCK_R, BLOCK_K] of some rows, of ``count`` splits each, in fp32.

    sums, stats: of the head. Zeros for a row without splits.
    """
    every = tl.arange(0, SPLITS)
    has_every = every[None, :] < count[:, None]
    own = stats + (row[:, None] * SPLITS + every[None, :]) * (HEADS * 2)
    tops = tl.load(own, mask=has_every, other=float("-inf"))
    totals = tl.load(own + 1, mask=has_every, other=0.0)
    highest = tl.max(tops, axis=1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(tops - highest[:, None]) * totals, axis=1)
    acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for first in range(0, tl.max(count, axis=0), BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        has_split = split[None, :] < count[:, None]
        at = (row[:, None] * SPLITS + split[None, :]) * HEADS
        top = tl.load(stats + at * 2, mask=has_split, other=float("-inf"))
        weight = tl.exp2(top - highest[:, None])
        mask = has_split[:, :, None] & has_channel[None, None, :]
        part = sums + (at * LATENT)[:, :, None] + channel[None, None, :]
        acc += tl.sum(weight[:, :, None] * tl.load(part, mask=mask, other=0.0), axis=1)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["rows"])
def value_gate(
    sums,
    stats,
    proj,
    row_position,
    w_uv,
    latents,
    products,
    counters,
    out,
    rows,
    EACH: tl.constexpr,
    PROJ: tl.constexpr,
    GATE_AT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """sums [rows, SPLITS, HEADS, LATENT], stats [rows, SPLITS, HEADS, 2]; proj [rows, PROJ], gates
    from GATE_AT on; w_uv [HEADS * VALUE, LATENT]; products [rows, parts, HEADS * VALUE] fp32 ->
    latents [rows, HEADS, LATENT], out [rows, HEADS * VALUE]."""
    PARTS: tl.constexpr = (LATENT + BLOCK_K - 1) // BLOCK_K
    WIDTH: tl.constexpr = HEADS * VALUE
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    has_row = row < rows
    channel = part * BLOCK_K + tl.arange(0, BLOCK_K)
    has_channel = channel < LATENT
    value = tl.arange(0, VALUE_BLOCK)
    has_value = value < VALUE
    mask = has_value[:, None] & has_channel[None, :]
    at = (head * VALUE + value)[:, None] * LATENT + channel[None, :]
    w = tl.load(w_uv + at, mask=mask, other=0.0)
    wait_for_previous()

    last = row // EACH * EACH + EACH - 1
    context = tl.load(row_position + last, mask=has_row, other=-1) + 1
    length = split_length(context, SPLITS)
    latent = _merged(
        sums + head * LATENT,
        stats + head * 2,
        row,
        channel,
        has_channel,
        (context + length - 1) // length,
        HEADS,
        LATENT,
        SPLITS,
        BLOCK_R,
        BLOCK_K,
        BLOCK_S,
    ).to(tl.bfloat16)
    mask = has_row[:, None] & has_channel[None, :]
    at = (row * HEADS + head)[:, None] * LATENT + channel[None, :]
    tl.store(latents + at, latent, mask=mask)

    if BLOCK_R >= 16:
        zeros = tl.zeros([VALUE_BLOCK, BLOCK_R], tl.float32)
        product = tl.trans(dot_bf16(w, tl.trans(latent), zeros))
    else:
        product = w.to(tl.float32)[None, :, :] * latent.to(tl.float32)[:, None, :]
        product = tl.sum(product, axis=2)
    mask = has_row[:, None] & has_value[None, :]
    at = (row * PARTS)[:, None] * WIDTH + (head * VALUE + value)[None, :]
    tl.store(products + at + part * WIDTH, product, mask=mask)

    if is_last_arrival(counters + tl.program_id(1) * HEADS + head, PARTS):
        total = tl.zeros([BLOCK_R, VALUE_BLOCK], tl.float32)
        for other in tl.static_range(PARTS):
            total += tl.load(products + at + other * WIDTH, mask=mask, other=0.0)
        if HAS_GATE:
            gate_at = row[:, None] * PROJ + GATE_AT + (head * VALUE + value)[None, :]
            gate = tl.load(proj + gate_at, mask=mask, other=0.0)
            total = total * sigmoid(gate.to(tl.float32))
        at = row[:, None] * WIDTH + (head * VALUE + value)[None, :]
        tl.store(out + at, total.to(tl.bfloat16), mask=mask)
