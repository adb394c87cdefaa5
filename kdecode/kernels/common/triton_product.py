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
# Sums of squares of a row that are loaded at once.
_SQUARES = tl.constexpr(64)
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
    default = _few_tile(inner) if few else _many_tile(rows, columns, inner, can_split)
    shape = f"rows {product_rows(rows)}, {columns} x {inner}"
    return choose(kernel, arch, shape, default)


def _few_tile(inner: int) -> ProductTile:
    """A warp has 256 inner columns, eight a thread, so that all of its columns have one input."""
    block_k = 512 if inner % 1024 and inner % 512 == 0 else 1024
    block_k = max(16, min(block_k, triton.next_power_of_2(inner)))
    # Products of one round have their weights in registers once, others those of two rounds.
    block_n = 8 if inner <= block_k else 4
    return ProductTile(block_n, block_k, 1, warps=max(1, block_k // 256), stages=2)


def _many_tile(rows: int, columns: int, inner: int, can_split: bool) -> ProductTile:
    """Of many rows a block has many columns, for each of which x is read again."""
    block_k, split = max(16, min(128, triton.next_power_of_2(inner))), 1
    is_narrow = row_block(rows) <= _DOT_ROWS
    block_n = 32 if is_narrow else 64
    while divide_up(columns, block_n) * split < _ENOUGH_PROGRAMS:
        if can_split and split < 4 and inner >= 4 * split * block_k:
            split *= 2
        elif not can_split and block_n > 16:
            block_n //= 2
        else:
            break
    return ProductTile(block_n, block_k, split, warps=4, stages=4 if is_narrow else 3)


@triton.jit
def _line(x, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k of a line of K, 0 behind its end; k is a block of BLOCK_K."""
    if K % BLOCK_K == 0:
        return tl.load(x + k)
    else:
        return tl.load(x + k, mask=k < K, other=0.0)


@triton.jit
def _inputs(x, k, norm, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr):
    """Columns k of one row in fp32; with NORM they are the whole row, and normalised."""
    part = _line(x, k, K, BLOCK_K).to(tl.float32)
    if NORM:
        part = round_bf16(part * tl.rsqrt(tl.sum(part * part) / K + eps) * norm)
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
    share = eps
    if NORM:
        tl.static_assert(BLOCK_K >= K, "a row is normalised in one round")
        share = _line(norm, k, K, BLOCK_K)
    wait_for_previous()
    sum0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sum1 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    last = begin + (end - begin - 1) // BLOCK_K * BLOCK_K
    for start in range(begin, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        next_w = _line(lines, k + BLOCK_K, K, BLOCK_K)
        sum0 += w.to(tl.float32) * _inputs(x, k, share, eps, K, BLOCK_K, NORM)
        if BLOCK_R == 2:
            sum1 += w.to(tl.float32) * _inputs(x + K, k, share, eps, K, BLOCK_K, NORM)
        w = next_w
    k = last + tl.arange(0, BLOCK_K)[None, :]
    sum0 += w.to(tl.float32) * _inputs(x, k, share, eps, K, BLOCK_K, NORM)
    if BLOCK_R == 2:
        sum1 += w.to(tl.float32) * _inputs(x + K, k, share, eps, K, BLOCK_K, NORM)
        return tl.join(tl.sum(sum0, axis=1), tl.sum(sum1, axis=1))
    else:
        return tl.sum(sum0, axis=1)[:, None]


@triton.jit
def _prefetch_early(lines, begin, K: tl.constexpr, EARLY: tl.constexpr, LINE: tl.constexpr):
    """The first EARLY columns from ``begin`` on into the second-level cache, or what there is."""
    at = begin + tl.arange(0, EARLY // LINE)[None, :] * LINE
    prefetch(lines + tl.minimum(at, K - 1))


@triton.jit
def _row_factors(
    squares, eps, rows, K: tl.constexpr, BLOCK_R: tl.constexpr, NUM_SQUARES: tl.constexpr
):
    """What RMSNorm multiplies rows of K numbers with, [BLOCK_R, 1], from the sums of squares of
    their blocks, [NUM_SQUARES, rows]."""
    block, r = tl.arange(0, _SQUARES)[:, None], tl.arange(0, BLOCK_R)[None, :]
    total = tl.zeros([_SQUARES, BLOCK_R], tl.float32)
    for first in tl.static_range(0, NUM_SQUARES, _SQUARES):
        inside = (first + block < NUM_SQUARES) & (r < rows)
        total += tl.load(squares + (first + block) * rows + r, mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(total, axis=0) / K + eps)[:, None]


@triton.jit
def _product_many(
    x,
    weight,
    norm,
    squares,
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
    NUM_SQUARES: tl.constexpr,
):
    """W [BLOCK_N, BLOCK_K] times x^T [BLOCK_K, BLOCK_R] on the tensor cores.

    With NORM a block of x is normalised and rounded on its way there: its rows are not whole, so
    that their squares come from whoever has made them.
    """
    r = tl.arange(0, BLOCK_R)[None, :]
    lines = weight + n.to(tl.int64)[:, None] * K
    _prefetch_early(lines, begin, K, _EARLY_COLUMNS, _LINE_COLUMNS)
    wait_for_previous()
    if NORM:
        tl.static_assert(NUM_SQUARES > 0, "the rows of a block are not whole")
        factor = _row_factors(squares, eps, rows, K, BLOCK_R, NUM_SQUARES)
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(begin, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        w = _line(lines, columns[None, :], K, BLOCK_K)
        if NORM:
            # Rows as they are in memory: of the other way around a thread would get single numbers.
            row, k = tl.arange(0, BLOCK_R)[:, None], columns[None, :]
            inside = row < rows
            if K % BLOCK_K != 0:
                inside = inside & (k < K)
            part = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
            part = tl.trans(to_bf16(part * factor * _line(norm, k, K, BLOCK_K)))
        elif K % BLOCK_K == 0:
            part = tl.load(x + r * K + columns[:, None], mask=r < rows, other=0.0)
        else:
            k = columns[:, None]
            part = tl.load(x + r * K + k, mask=(r < rows) & (k < K), other=0.0)
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
    squares=None,
    NUM_SQUARES: tl.constexpr = 0,
):
    """Columns n [BLOCK_N] of x [rows, K] W^T over inputs begin to end, [BLOCK_N, BLOCK_R] fp32.

    No n may be outside of W; begin is a multiple of BLOCK_K and below end. Weights are asked for
    before `wait_for_previous`, which is called here. With NORM the inputs are RMSNorm(x; norm),
    rounded to bf16: of few rows with a BLOCK_K of at least K, of many from ``squares``, fp32
    [NUM_SQUARES, rows], whose sum over the first axis is that of a row's squares.
    """
    if BLOCK_R <= 2:
        return _product_few(x, weight, norm, eps, n, begin, end, K, BLOCK_R, BLOCK_N, BLOCK_K, NORM)
    else:
        return _product_many(
            x,
            weight,
            norm,
            squares,
            eps,
            n,
            rows,
            begin,
            end,
            K,
            BLOCK_R,
            BLOCK_N,
            BLOCK_K,
            NORM,
            NUM_SQUARES,
        )
