"""Device functions that the Triton kernels of grouped-query attention share, and their refusals.

Owns how the heads of a row are normed and turned by position, and the cache row that a block's rows
and committed tokens have alike: [keys, values] of all heads. Pairs that turn are halves of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.config import GqaConfig
from kdecode.kernels.common.triton_launch import refuse_plan_rows
from kdecode.kernels.common.triton_mla import row_scale
from kdecode.kernels.common.triton_ops import round_bf16
from kdecode.kernels.common.triton_pages import row_page
from kdecode.kernels.contract import Problem

# Heads of a row that a program norms and turns.
HEAD_BLOCK = 8
# Channels of a head. Keys and values of a round are in shared memory, and a program has the sums of
# its lanes in registers: tiles were compiled up to here.
MAX_HEAD_DIM = 256


@triton.jit
def turned_heads(
    x,
    norm,
    rotation,
    head,
    has_head,
    DIM: tl.constexpr,
    EPS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Both halves of heads after their norm, turned by position: [heads, HALF_BLOCK] fp32, not
    rounded; and where they are.

    x: heads of DIM bf16 channels, one behind the other. rotation: of the row, the cosines of all
    pairs, then the sines.
    """
    HALF: tl.constexpr = DIM // 2
    pair = tl.arange(0, HALF_BLOCK)
    has_pair = pair < HALF
    inside = has_head[:, None] & has_pair[None, :]
    at = head[:, None] * DIM + pair[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = row_scale(tl.sum(a * a + b * b, axis=1), DIM, EPS)[:, None]
    a = round_bf16(a * scale * tl.load(norm + pair, mask=has_pair, other=0.0)[None, :])
    b = round_bf16(b * scale * tl.load(norm + HALF + pair, mask=has_pair, other=0.0)[None, :])
    cosine = tl.load(rotation + pair, mask=has_pair, other=0.0)[None, :]
    sine = tl.load(rotation + HALF + pair, mask=has_pair, other=0.0)[None, :]
    return a * cosine - b * sine, b * cosine + a * sine, at, inside


@triton.jit
def insert_heads(
    projected,
    k_norm,
    row_position,
    row_pages,
    rotation,
    pages,
    row,
    first,
    max_pages,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """The part of a row's cache row that BLOCK_H heads have, from ``first`` on.

    projected: of the row, HEADS * DIM keys, then as many values; rotation: of the row. Nothing is
    written where row_pages has no page (-1).
    """
    page, place = row_page(row_position, row_pages, row, max_pages, PAGE_TOKENS)
    if page >= 0:
        WIDTH: tl.constexpr = HEADS * DIM
        head = first + tl.arange(0, BLOCK_H)
        to = pages + (page.to(tl.int64) * PAGE_TOKENS + place) * (2 * WIDTH)
        a, b, at, inside = turned_heads(
            projected, k_norm, rotation, head, head < HEADS, DIM, EPS, HALF_BLOCK
        )
        tl.store(to + at, a.to(tl.bfloat16), mask=inside)
        tl.store(to + at + DIM // 2, b.to(tl.bfloat16), mask=inside)
        # Values are copied, half by half as the keys are.
        for half in tl.static_range(2):
            own = WIDTH + at + half * (DIM // 2)
            value = tl.load(projected + own, mask=inside, other=0.0)
            tl.store(to + own, value, mask=inside)


def grouped(problem: Problem) -> GqaConfig:
    """The attention of a stack that has it; ValueError for another one."""
    if problem.config.gqa is None:
        raise ValueError("The layers of this model have no grouped-query attention.")
    return problem.config.gqa


def refuse_grouped(problem: Problem) -> list[str]:
    """Reasons that every step of grouped-query attention has in common."""
    reasons = refuse_plan_rows(problem)
    if problem.rotation_scale is None:
        reasons.append("Grouped-query attention is rotated; this model's rows do not turn.")
    if problem.cache_dtype != "bf16":
        reasons.append(
            f"Rows of keys and values are cached in bf16; {problem.cache_dtype} was asked for."
        )
    width = problem.config.rotated_dim
    if width < 2 or width % 2:
        reasons.append(f"Channels are rotated in pairs; a head has {width} that are.")
    dim = grouped(problem).head_dim
    if dim > MAX_HEAD_DIM:
        reasons.append(
            f"Heads of grouped queries have at most {MAX_HEAD_DIM} channels in Triton; this "
            f"model's have {dim}."
        )
    return reasons
