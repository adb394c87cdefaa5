"""Device functions that the Triton kernels of latent attention share, and their common refusals."""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common import mla_splits
from kdecode.kernels.common.triton_launch import refuse_plan_rows
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


def refuse_plan(problem: Problem) -> list[str]:
    """Reasons that every step of latent attention has in common."""
    reasons = refuse_plan_rows(problem)
    if problem.rotation_scale is not None:
        reasons.append(
            "The Triton kernels have no rotated attention; the plan is of a draft, with a rotation "
            f"scale of {problem.rotation_scale}."
        )
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
