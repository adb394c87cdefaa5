"""y = x W^T as a launch of its own: a program makes a block of output columns for all rows.

Of three rows or more and few columns several programs share a block, each with a part of the input
columns; the last of them adds the parts in order. Owns the kernel and how its launch is made, for
every op that has such a product. Knows no op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import Launch, divide_up, plan_rows
from kdecode.kernels.common.triton_ops import is_last_arrival, round_bf16
from kdecode.kernels.common.triton_peers import signal_if_last, signal_of
from kdecode.kernels.common.triton_product import product, product_rows, product_tile
from kdecode.kernels.contract import Buffers, PartBlock, Problem


def projection_launch(
    problem: Problem,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    buffers: Buffers,
    *,
    is_rounded: bool = True,
    block: PartBlock | None = None,
) -> Launch:
    """x bf16 [rows, inner], weight bf16 [columns, inner], out bf16 or fp32 [rows, columns], all of
    which the caller has checked. is_rounded: to bf16, also where ``out`` is fp32. block: where the
    launch makes the whole of a part for other ranks, that part's.
    """
    rows, (columns, inner) = plan_rows(problem), weight.shape
    tile = product_tile("projection", problem.arch, rows, columns, inner, can_split=True)
    blocks, block_r = divide_up(columns, tile.block_n), product_rows(rows)
    # Each program but the last has so many rounds of input columns, and none has none.
    rounds = divide_up(inner, tile.block_k * tile.split)
    split = divide_up(inner, tile.block_k * rounds)
    signal = signal_of(block, buffers, out)
    partial, counters = out, out  # not used by one program a block
    if split > 1:
        # Of another size for another matrix.
        size = split * blocks * tile.block_n * block_r
        partial = buffers.scratch(f"product_parts_{size}", (size,), torch.float32)
        counters = buffers.counters(blocks)
    arguments = {
        "x": x,
        "weight": weight,
        "out": out,
        "partial": partial,
        "counters": counters,
        **signal.arguments,
        "rows": rows,
    }
    constants = {
        "COLUMNS": columns,
        "INNER": inner,
        "BLOCK_R": block_r,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "ROUNDS": rounds,
        "SPLIT": split,
        "ROUND": is_rounded,
        **signal.constants,
    }
    grid = (blocks, split)
    return Launch(
        projection, grid, arguments, constants, tile.warps, tile.stages, begins_early=True
    )


@triton.jit
def _store(acc, out, n, rows, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, ROUND: tl.constexpr):
    """With ROUND to bf16, also where the buffer is fp32."""
    r = tl.arange(0, BLOCK_R)[None, :]
    inside = (r < rows) & (n < COLUMNS)[:, None]
    if ROUND:
        acc = round_bf16(acc)
    tl.store(out + r * COLUMNS + n[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def projection(
    x,
    weight,
    out,
    partial,
    counters,
    arrivals,
    peers,
    rows,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROUNDS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROUND: tl.constexpr,
    PEERS: tl.constexpr,
):
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, COLUMNS - 1)
    begin = part * ROUNDS * BLOCK_K
    end = tl.minimum(begin + ROUNDS * BLOCK_K, INNER)
    acc = product(
        x, weight, x, 0.0, held, rows, begin, end, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False
    )
    if SPLIT == 1:
        _store(acc, out, n, rows, COLUMNS, BLOCK_R, ROUND)
        signal_if_last(arrivals, tl.num_programs(0), peers, PEERS)
    else:
        size: tl.constexpr = BLOCK_N * BLOCK_R
        own = tl.arange(0, BLOCK_N)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        first = partial + block * SPLIT * size
        tl.store(first + part * size + own, acc)
        if is_last_arrival(counters + block, SPLIT):
            total = tl.load(first + own)
            for other in tl.static_range(1, SPLIT):
                total += tl.load(first + other * size + own)
            _store(total, out, n, rows, COLUMNS, BLOCK_R, ROUND)
            signal_if_last(arrivals, tl.num_programs(0), peers, PEERS)
