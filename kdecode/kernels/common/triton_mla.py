"""Device functions that the Triton kernels of latent attention share, and their common refusals.

Owns the cache row of one row of a step, which the target's layers and a draft's write alike, and
how a draft's channels turn by position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common import mla_splits
from kdecode.kernels.common.triton_launch import refuse_plan_rows
from kdecode.kernels.common.triton_ops import round_bf16, wait_for_previous
from kdecode.kernels.common.triton_pages import row_page
from kdecode.kernels.contract import Problem

CACHE_DTYPES = ("bf16", "fp8")

_ROUND_TOKENS = tl.constexpr(mla_splits.ROUND_TOKENS)


@triton.jit
def split_length(context, SPLITS: tl.constexpr):
    """Tokens of a split of a context: the smallest power of two of which SPLITS cover it.

    context: int32, a number or a tensor, up to 2^20 times the shortest split.
    """
    tokens = context * 0 + _ROUND_TOKENS
    for _ in tl.static_range(16):
        tokens = tl.where(tokens * SPLITS < context, tokens * 2, tokens)
    return tokens


@triton.jit
def row_scale(total, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """What an RMSNorm multiplies a row of WIDTH numbers by; total: the sum of their squares."""
    return tl.rsqrt(total / WIDTH + EPS)


@triton.jit
def e4m3_bits(x):
    """The E4M3 code of each fp32 number, uint8: nearest, ties to even, at most 448; NaN is NaN.

    By integers, so that a kernel stores the same on every device.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Of 23 bits of mantissa 3 stay, and the exponent's bias changes from 127 to 7.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (120 << 3)
    # A float of 2^14 and more counts in steps of 2^-9, like E4M3 below 2^-6.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def turned_pairs(x, rotation, pair, mask, DIM: tl.constexpr):
    """The two channels of each pair of neighbours, turned by position, in fp32 and not rounded.

    x: DIM bf16 channels; rotation: of the same row, the cosines of all pairs, then the sines.
    """
    a = tl.load(x + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(rotation + pair, mask=mask, other=0.0)
    sine = tl.load(rotation + DIM // 2 + pair, mask=mask, other=0.0)
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def _store_cached(to, x, mask, cache_scale, IS_FP8: tl.constexpr):
    """fp32 numbers of a cache row that bf16 can hold."""
    if IS_FP8:
        tl.store(to, e4m3_bits(tl.div_rn(x, cache_scale)), mask=mask)
    else:
        tl.store(to, x.to(tl.bfloat16), mask=mask)


@triton.jit
def insert_row(
    proj,
    kv_norm,
    row_position,
    row_pages,
    row_rotation,
    pages,
    row,
    max_pages,
    cache_scale,
    PROJ: tl.constexpr,
    LATENT_AT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    EPS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """The cache row of one row of the step: proj [rows, PROJ], the latent from LATENT_AT on.

    row_rotation [rows, ROPE] is read with IS_ROTATED only. Nothing is written where row_pages has
    no page (-1).
    """
    wait_for_previous()
    page, line = row_page(row_position, row_pages, row, max_pages, PAGE_TOKENS)
    if page >= 0:
        channel = tl.arange(0, LATENT_BLOCK)
        has_channel = channel < LATENT
        own = proj + row * PROJ + LATENT_AT
        x = tl.load(own + channel, mask=has_channel, other=0.0).to(tl.float32)
        factor = tl.load(kv_norm + channel, mask=has_channel, other=0.0)
        normed = round_bf16(x * row_scale(tl.sum(x * x), LATENT, EPS) * factor)
        place = page.to(tl.int64) * PAGE_TOKENS + line
        to = pages + place * (LATENT + ROPE)
        _store_cached(to + channel, normed, has_channel, cache_scale, IS_FP8)
        if IS_ROTATED:
            pair = tl.arange(0, ROPE_BLOCK // 2)
            has_pair = 2 * pair < ROPE
            rotation = row_rotation + row * ROPE
            first, second = turned_pairs(own + LATENT, rotation, pair, has_pair, ROPE)
            at = to + LATENT + 2 * pair
            _store_cached(at, round_bf16(first), has_pair, cache_scale, IS_FP8)
            _store_cached(at + 1, round_bf16(second), has_pair, cache_scale, IS_FP8)
        else:
            rest = tl.arange(0, ROPE_BLOCK)
            has_rest = rest < ROPE
            key = tl.load(own + LATENT + rest, mask=has_rest, other=0.0).to(tl.float32)
            _store_cached(to + LATENT + rest, key, has_rest, cache_scale, IS_FP8)


def refuse_plan(problem: Problem) -> list[str]:
    """Reasons that every step of latent attention has in common."""
    reasons = refuse_plan_rows(problem)
    width = problem.config.mla.rope_dim
    if problem.rotation_scale is not None and (width < 2 or width % 2):
        reasons.append(f"Channels are rotated in pairs; a head has {width} that are.")
    return reasons


def refuse_cache(problem: Problem) -> list[str]:
    """Reasons of the steps that read or write cache rows."""
    reasons = []
    if problem.cache_dtype not in CACHE_DTYPES:
        reasons.append(
            f"Triton MLA caches are {' or '.join(CACHE_DTYPES)}; "
            f"{problem.cache_dtype} was asked for."
        )
    return reasons
