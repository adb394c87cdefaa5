"""The residual mix and norm of a row that several programs have made, in the last to arrive.

Device functions of a launch whose programs have some columns of one row. What the mix goes by, a
score for each of its sources, is a sum over columns: every program leaves its own part of it, of
older snapshots as early as before the launch ahead is over, so that the last one reads the sources
once. The maths is that of mix_norm. Knows no op.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.triton_mix import mixed_by, store_normed
from kdecode.kernels.common.triton_ops import is_last_arrival, prefetch

# Numbers of fp32 of a line of memory.
_LINE = tl.constexpr(32)


def num_sums(programs: int, sources: int) -> int:
    """fp32 numbers that ``programs`` leave of a row. sources: BLOCK_S."""
    return programs * 2 * (sources + 1)


@triton.jit
def scored_early(
    snapshots,
    mix_weight,
    norm_weight,
    row,
    rows,
    n,
    inside,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Before the launch ahead is over: the mix's weights of this program's columns, and of the
    first COUNT snapshots the sums of their products with them and of their squares, [BLOCK_S]."""
    # For the row's last program.
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N // _LINE) * _LINE
    prefetch(norm_weight + tl.minimum(line, WIDTH - 1))
    mix = tl.load(mix_weight + n, mask=inside, other=0.0)
    s = tl.arange(0, BLOCK_S)
    products, squares = tl.zeros([BLOCK_S], tl.float32), tl.zeros([BLOCK_S], tl.float32)
    if COUNT > 0:
        source = snapshots + (s[:, None] * rows + row) * WIDTH + n[None, :]
        has = (s < COUNT)[:, None] & inside[None, :]
        x = tl.load(source, mask=has, other=0.0).to(tl.float32)
        products, squares = tl.sum(x * mix[None, :], axis=1), tl.sum(x * x, axis=1)
    return mix, products, squares


@triton.jit
def leave_sums(
    sums,
    row,
    mix,
    products,
    squares,
    old,
    new,
    PROGRAMS: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PUSH: tl.constexpr,
):
    """The same sums of all sources of the mix, for the row's last program: of the snapshots, whose
    last is the old prefix with PUSH, and of the new prefix."""
    s = tl.arange(0, BLOCK_S)
    if PUSH:
        x = old.to(tl.float32)
        products = tl.where(s == SNAPSHOTS - 1, tl.sum(x * mix, axis=0), products)
        squares = tl.where(s == SNAPSHOTS - 1, tl.sum(x * x, axis=0), squares)
    line = sums + (row * PROGRAMS + tl.program_id(0)) * (2 * BLOCK_S + 2)
    tl.store(line + s, products)
    tl.store(line + BLOCK_S + s, squares)
    x = new.to(tl.float32)
    tl.store(line + 2 * BLOCK_S, tl.sum(x * mix, axis=0))
    tl.store(line + 2 * BLOCK_S + 1, tl.sum(x * x, axis=0))


@triton.jit
def _scores(
    sums,
    row,
    eps,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Of the snapshots, [BLOCK_S], and of the prefix, from what the row's programs have left."""
    program, s = tl.arange(0, triton.next_power_of_2(PROGRAMS)), tl.arange(0, BLOCK_S)
    line = sums + (row * PROGRAMS + program) * (2 * BLOCK_S + 2)
    has = program < PROGRAMS
    at = line[:, None] + s[None, :]
    products = tl.sum(tl.load(at, mask=has[:, None], other=0.0), axis=0)
    squares = tl.sum(tl.load(at + BLOCK_S, mask=has[:, None], other=0.0), axis=0)
    product = tl.sum(tl.load(line + 2 * BLOCK_S, mask=has, other=0.0), axis=0)
    square = tl.sum(tl.load(line + 2 * BLOCK_S + 1, mask=has, other=0.0), axis=0)
    scores = tl.where(s < SNAPSHOTS, products * tl.rsqrt(squares / WIDTH + eps), float("-inf"))
    return scores, product * tl.rsqrt(square / WIDTH + eps)


@triton.jit
def last_mixes(
    row,
    counters,
    sums,
    prefix,
    snapshots,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    rows,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The mix and norm of a row whose programs have all stored what they made of it."""
    if is_last_arrival(counters + row, PROGRAMS):
        columns = tl.arange(0, BLOCK_WIDTH)[None, :]
        inside = columns < WIDTH
        mixed = tl.load(prefix + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(norm_weight + columns, mask=inside, other=0.0)
        if SNAPSHOTS > 0:
            # Behind the last snapshot it is read again, with a share of zero.
            number = tl.minimum(tl.arange(0, BLOCK_S), SNAPSHOTS - 1)[:, None]
            source = snapshots + (number * rows + row) * WIDTH + columns
            read = tl.load(source, mask=inside, other=0.0)
            scores, score = _scores(sums, row, eps, PROGRAMS, WIDTH, SNAPSHOTS, BLOCK_S)
            mixed = mixed_by(read, scores, mixed, score)
        store_normed(mixed, norm, row, columns, inside, mix_out, norm_out, eps, WIDTH)
