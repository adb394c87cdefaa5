"""Skinny products of a CUDA plan: y = x W^T for up to 64 rows of x, W read once, in 16-byte loads.

Device functions: a program makes a block of output columns for all rows, [BLOCK_N, BLOCK_R] in
fp32, not rounded. One or two rows are multiplied and summed in fp32, as most of a tensor core would
idle; more go through it, with W as the left operand. Host side: a block's sizes. Knows no op.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import divide_up, row_block
from kdecode.kernels.common.triton_ops import (
    dot_bf16,
    prefetch,
    round_bf16,
    to_bf16,
    wait_for_previous,
)

# Up to so many rows are multiplied without a tensor core, whose operands have at least 16.
FEW_ROWS = 2
_DOT_ROWS = 16
# Before they wait for the last launch, programs of many rows have so many columns of their weights
# fetched, a line of memory at a time.
_EARLY_COLUMNS = tl.constexpr(2048)
_LINE_COLUMNS = tl.constexpr(64)
# Programs that keep the memory of a large GPU busy: about one for each of its processors.
_ENOUGH_PROGRAMS = 128


@dataclass(frozen=True)
class ProductTile:
    """block_n output columns a program, block_k input columns at a time, split programs a block."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


def product_rows(rows: int) -> int:
    """BLOCK_R of a product of so many rows."""
    return rows if rows <= FEW_ROWS else max(row_block(rows), _DOT_ROWS)


def product_tile(
    kernel: str, arch: str, rows: int, columns: int, inner: int, *, can_split: bool = False
) -> ProductTile:
    """Of [rows, inner] x [inner, columns]: the table's tile, else one that is good anywhere.

    can_split: whether the kernel can share a block's inner columns among programs.
    """
    few = rows <= FEW_ROWS
    block_k = max(16, min(1024 if few else 128, triton.next_power_of_2(inner)))
    block_n = 8 // rows if few else 64
    while not few and block_n > 16 and divide_up(columns, block_n) < _ENOUGH_PROGRAMS:
        block_n //= 2
    split = 1
    if can_split and not few:
        while (
            split < 4
            and divide_up(columns, block_n) * split < _ENOUGH_PROGRAMS
            and inner >= 4 * split * block_k
        ):
            split *= 2
    default = ProductTile(block_n, block_k, split, warps=4, stages=2 if few else 4)
    shape = f"rows {product_rows(rows)}, {columns} x {inner}"
    return choose(kernel, arch, shape, default)


@triton.jit
def _few_scale(x, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """rsqrt(mean(x^2) + eps) of one row."""
    total = tl.zeros([1, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        part = _line(x, start + tl.arange(0, BLOCK_K)[None, :], K, BLOCK_K).to(tl.float32)
        total += part * part
    return tl.rsqrt(tl.sum(total) / K + eps)


@triton.jit
def _line(x, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k of a line of K, 0 behind its end; k is a block of BLOCK_K."""
    if K % BLOCK_K == 0:
        return tl.load(x + k)
    else:
        return tl.load(x + k, mask=k < K, other=0.0)


@triton.jit
def _inputs(part, k, scale, norm, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr):
    """bf16 inputs of columns k in fp32, normalised where there is a norm."""
    part = part.to(tl.float32)
    if NORM:
        part = round_bf16(part * scale * _line(norm, k, K, BLOCK_K))
    return part


@triton.jit
def _product_few(
    x,
    weight,
    norm,
    eps,
    n,
    begin,
    end,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """One or two rows. A thread keeps its inputs for all BLOCK_N columns; sums join at the end.

    The next weights are loaded before the last ones are used, the first of all early.
    """
    lines = weight + n.to(tl.int64)[:, None] * K
    k = begin + tl.arange(0, BLOCK_K)[None, :]
    w = _line(lines, k, K, BLOCK_K)
    wait_for_previous()
    scale0 = 1.0
    scale1 = 1.0
    if NORM:
        scale0 = _few_scale(x, eps, K, BLOCK_K)
        if BLOCK_R == 2:
            scale1 = _few_scale(x + K, eps, K, BLOCK_K)
    x0 = _line(x, k, K, BLOCK_K)
    x1 = x0
    if BLOCK_R == 2:
        x1 = _line(x + K, k, K, BLOCK_K)
    sum0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sum1 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(begin + BLOCK_K, end, BLOCK_K):
        ahead = start + tl.arange(0, BLOCK_K)[None, :]
        next_w = _line(lines, ahead, K, BLOCK_K)
        next_x0 = _line(x, ahead, K, BLOCK_K)
        sum0 += w.to(tl.float32) * _inputs(x0, k, scale0, norm, K, BLOCK_K, NORM)
        if BLOCK_R == 2:
            next_x1 = _line(x + K, ahead, K, BLOCK_K)
            sum1 += w.to(tl.float32) * _inputs(x1, k, scale1, norm, K, BLOCK_K, NORM)
            x1 = next_x1
        w = next_w
        x0 = next_x0
        k = ahead
    sum0 += w.to(tl.float32) * _inputs(x0, k, scale0, norm, K, BLOCK_K, NORM)
    if BLOCK_R == 2:
        sum1 += w.to(tl.float32) * _inputs(x1, k, scale1, norm, K, BLOCK_K, NORM)
        return tl.join(tl.sum(sum0, axis=1), tl.sum(sum1, axis=1))
    else:
        return tl.sum(sum0, axis=1)[:, None]


@triton.jit
def _many_scale(x, eps, rows, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """rsqrt(mean(x^2) + eps) of every row, [BLOCK_R]."""
    r = tl.arange(0, BLOCK_R)[:, None]
    total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        part = tl.load(x + r * K + k, mask=(r < rows) & (k < K), other=0.0).to(tl.float32)
        total += part * part
    return tl.rsqrt(tl.sum(total, axis=1) / K + eps)


@triton.jit
def _prefetch_early(lines, begin, K: tl.constexpr, EARLY: tl.constexpr, LINE: tl.constexpr):
    """The first EARLY columns from ``begin`` on into the second-level cache, or what there is."""
    at = begin + tl.arange(0, EARLY // LINE)[None, :] * LINE
    prefetch(lines + tl.minimum(at, K - 1))


@triton.jit
def _product_many(
    x,
    weight,
    norm,
    eps,
    n,
    rows,
    begin,
    end,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """W [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_R] on the tensor cores."""
    r = tl.arange(0, BLOCK_R)[None, :]
    lines = weight + n.to(tl.int64)[:, None] * K
    _prefetch_early(lines, begin, K, _EARLY_COLUMNS, _LINE_COLUMNS)
    wait_for_previous()
    if NORM:
        scale = _many_scale(x, eps, rows, K, BLOCK_R, BLOCK_K)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(begin, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        k = columns[:, None]
        w = _line(lines, columns[None, :], K, BLOCK_K)
        if K % BLOCK_K == 0:
            part = tl.load(x + r * K + k, mask=r < rows, other=0.0)
        else:
            part = tl.load(x + r * K + k, mask=(r < rows) & (k < K), other=0.0)
        if NORM:
            part = to_bf16(_inputs(part, k, scale, norm, K, BLOCK_K, NORM))
        acc = dot_bf16(w, part, acc)
    return acc


@triton.jit
def product(
    x,
    weight,
    norm,
    eps,
    n,
    rows,
    begin,
    end,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """Columns n [BLOCK_N] of x [rows, K] W^T over inputs begin to end, [BLOCK_N, BLOCK_R] fp32.

    With NORM the inputs are RMSNorm(x; norm), rounded to bf16. No n may be outside of W; begin is a
    multiple of BLOCK_K. Weights are asked for before `wait_for_previous`, which is called here.
    """
    if BLOCK_R <= 2:
        return _product_few(x, weight, norm, eps, n, begin, end, K, BLOCK_R, BLOCK_N, BLOCK_K, NORM)
    else:
        return _product_many(
            x, weight, norm, eps, n, rows, begin, end, K, BLOCK_R, BLOCK_N, BLOCK_K, NORM
        )
