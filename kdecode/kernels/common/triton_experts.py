"""Products with rows of a layer's experts: what expert_up, expert_down and the standard path share.

Device functions; `ExpertStack` is where the weights are. A step of few rows multiplies every (row,
slot) pair by itself in fp32: hardly two of them have one expert. More rows go through the tensor
cores, a tile of pairs of one expert at a time. MXFP4 becomes numbers in registers, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.triton_mxfp4 import (
    SUM_FACTOR,
    dequantised,
    multiplied,
    scale_value,
)
from kdecode.kernels.common.triton_ops import dot_bf16


@triton.jit
def few_products(
    x,
    data,
    scales,
    lines,
    is_line,
    INNER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CODED: tl.constexpr,
):
    """Lines [L, I, 1] of a matrix times inputs [1, I, 1], fp32 [L, I].

    x: where the inputs begin. data: of MXFP4 and of x then, int32 words. lines: the numbers of the
    matrix's rows, int64, of which ``is_line`` are read. INNER: columns.
    """
    PER_WORD: tl.constexpr = 8 if IS_CODED else 1
    BLOCK: tl.constexpr = BLOCK_K // PER_WORD
    WORDS: tl.constexpr = INNER // PER_WORD
    total = tl.zeros([lines.shape[0], lines.shape[1], BLOCK], tl.float32)
    for start in range(0, WORDS, BLOCK):
        k = (start + tl.arange(0, BLOCK))[None, None, :]
        inside = is_line & (k < WORDS)
        if IS_CODED:
            # A word a thread, as the inputs are: with four, every number would change its thread.
            at = tl.max_contiguous(data + lines * WORDS + k, [1, 1, 1])
            words = tl.load(at, mask=inside, other=0)
            scale = tl.load(scales + lines * (WORDS // 4) + k // 4, mask=inside, other=0)
            near = x + 4 * k
            has_x = k < WORDS
            part = multiplied(
                words,
                tl.load(near, mask=has_x, other=0),
                tl.load(near + 1, mask=has_x, other=0),
                tl.load(near + 2, mask=has_x, other=0),
                tl.load(near + 3, mask=has_x, other=0),
            )
            total += part * scale_value(scale)
        else:
            weight = tl.load(data + lines * INNER + k, mask=inside, other=0.0)
            part = tl.load(x + k, mask=k < INNER, other=0.0)
            total += weight.to(tl.float32) * part.to(tl.float32)
    if IS_CODED:
        return tl.sum(total, axis=2) * SUM_FACTOR
    else:
        return tl.sum(total, axis=2)


@triton.jit
def _scales_at(scales, lines, start, INNER: tl.constexpr, BLOCK_K: tl.constexpr):
    groups = (start // 32 + tl.arange(0, BLOCK_K // 32))[None, :]
    return tl.load(scales + lines * (INNER // 32) + groups, mask=groups < INNER // 32, other=0)


@triton.jit
def many_products(
    x,
    at,
    has_row,
    data,
    scales,
    lines,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CODED: tl.constexpr,
):
    """Lines [BLOCK_N] of a matrix times gathered inputs, fp32 [BLOCK_N, rows].

    x bf16; at: where in it the inputs begin, int64 [rows], of which ``has_row`` are read. data: of
    MXFP4 int32 words. lines: int64, all inside of the matrix.
    """
    acc = tl.zeros([BLOCK_N, at.shape[0]], tl.float32)
    lines = lines[:, None]
    if IS_CODED:
        scale = _scales_at(scales, lines, 0, INNER, BLOCK_K)
    for start in range(0, INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        wanted = has_row[None, :] & (k < INNER)[:, None]
        inputs = tl.load(x + at[None, :] + k[:, None], mask=wanted, other=0.0)
        if IS_CODED:
            words = (start // 8 + tl.arange(0, BLOCK_K // 8))[None, :]
            read = tl.load(data + lines * (INNER // 8) + words, mask=words < INNER // 8, other=0)
            # A byte at a time is too little for a copy that runs ahead; so these are loaded early.
            following = _scales_at(scales, lines, start + BLOCK_K, INNER, BLOCK_K)
            weight = dequantised(read, scale, BLOCK_N, BLOCK_K)
            scale = following
        else:
            columns = k[None, :]
            weight = tl.load(data + lines * INNER + columns, mask=columns < INNER, other=0.0)
        acc = dot_bf16(weight, inputs, acc)
    return acc


@triton.jit
def expert_of_place(
    ids, place, pairs, EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BY_PAIR: tl.constexpr
):
    """Which expert a program has, of a grid of places, and the pairs that chose it, [BLOCK_P].

    BY_PAIR: a place is a pair, and the first pair of an expert has all of them; the others have
    none. Else it is an expert. ids outside of [0, EXPERTS) are together the expert EXPERTS.
    """
    p = tl.arange(0, BLOCK_P)
    chosen = tl.load(ids + p, mask=p < pairs, other=0)
    chosen = tl.where((chosen >= 0) & (chosen < EXPERTS), chosen, EXPERTS)
    expert = place
    if BY_PAIR:
        expert = tl.sum(tl.where(p == place, chosen, 0))
    match = (chosen == expert) & (p < pairs)
    if BY_PAIR:
        first = tl.min(tl.where(match, p, BLOCK_P))
        match = match & (first == place)
    return expert, match


@triton.jit
def pairs_of_tile(match, last, count, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first ``count`` matching pairs behind the pair ``last``, [BLOCK_R], and the last of them.

    One after the other: an expert of a small step has one or two.
    """
    p = tl.arange(0, BLOCK_P)
    slot = tl.arange(0, BLOCK_R)
    pair = tl.zeros([BLOCK_R], tl.int32)
    for i in range(0, tl.minimum(count, BLOCK_R)):
        last = tl.min(tl.where(match & (p > last), p, BLOCK_P), axis=0)
        pair = tl.where(slot == i, last, pair)
    return pair, last


@triton.jit
def weighted_sums(
    outputs,
    ids,
    weights,
    row,
    is_row,
    n,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """sum_k weights[r, k] outputs[r, k, n], fp32 [rows, n], in the order of the slots.

    row int64 [rows, 1]; n [1, columns], all inside. An id outside of [0, EXPERTS) makes it NaN.
    """
    total = tl.zeros([row.shape[0], n.shape[1]], tl.float32)
    for slot in range(TOP_K):
        pair = row * TOP_K + slot
        chosen = tl.load(ids + pair, mask=is_row, other=0)
        is_valid = (chosen >= 0) & (chosen < EXPERTS)
        weight = tl.load(weights + pair, mask=is_row, other=0.0)
        output = tl.load(outputs + pair * SIDE + n, mask=is_row & is_valid, other=0.0)
        total += tl.where(is_valid, weight * output.to(tl.float32), float("nan"))
    return total
