"""attn_join in CuTe DSL, for up to 8 rows: o_proj, the residual and the push of a snapshot.

Annotations are objects here: the compiler reads them.
"""

from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, cute

from kdecode.kernels.common.cute_launch import (
    CuteLaunch,
    CuteStep,
    aligned,
    refuse_product,
    weights_of,
)
from kdecode.kernels.common.cute_product import product_launch, sum_parts, total
from kdecode.kernels.common.cute_tiles import MAX_ROWS, product_sizes
from kdecode.kernels.common.triton_launch import plan_rows, tensor_for
from kdecode.kernels.contract import Buffers, Problem

BF16 = torch.bfloat16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = refuse_product(problem, problem.config.kda.width)
    if not problem.ranks.is_alone:
        reasons.append(
            f"attn_join in CuTe DSL exchanges nothing, and there are {problem.ranks.size} ranks."
        )
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> CuteStep:
    """weights: a `PackedLayer` with matrices in "rows"."""
    assert problem.layer is not None
    config, matrix = problem.config, weights.attention.o_proj
    rows, (width, inner) = plan_rows(problem), (config.hidden_size, matrix.cols)
    is_push = config.is_snapshot_layer(problem.layer)
    prefix = tensor_for(buffers["prefix"], BF16, (rows, width), name="prefix")
    pushed = prefix  # not written
    if is_push:
        pushed = buffers["snapshots"][config.snapshots_before(problem.layer)]
        tensor_for(pushed, BF16, (rows, width), name="the pushed snapshot")
    x = tensor_for(buffers["attn_out"], BF16, (rows, inner), name="attn_out")
    arguments = {
        "x": aligned(x, "attn_out"),
        "weight": weights_of(matrix, (width, inner), "the matrix of attn_delta"),
        "delta_out": tensor_for(buffers["attn_delta"], BF16, (rows, width), name="attn_delta"),
        "prefix": prefix,
        "pushed": pushed,
        "rows": rows,
    }
    sizes = product_sizes("join", problem.arch, width, inner)
    return CuteStep(CuteLaunch(attn_join, problem.arch, sizes, arguments, {"push": is_push}))


@cute.jit
def attn_join(
    x: cute.Pointer,
    weight: cute.Pointer,
    delta_out: cute.Pointer,
    prefix: cute.Pointer,
    pushed: cute.Pointer,
    rows: Int32,
    stream: CUstream,
    sizes: cutlass.Constexpr,
    push: cutlass.Constexpr,
) -> None:
    kernel = _attn_join(x, weight, delta_out, prefix, pushed, rows, sizes, push)
    product_launch(sizes, kernel, stream)


@cute.kernel
def _attn_join(
    x: cute.Pointer,
    weight: cute.Pointer,
    delta_out: cute.Pointer,
    prefix: cute.Pointer,
    pushed: cute.Pointer,
    rows: Int32,
    sizes: cutlass.Constexpr,
    push: cutlass.Constexpr,
) -> None:
    """delta = bf16(x W^T); prefix = bf16(prefix + delta), or with ``push`` a new one from delta."""
    collected = sum_parts(x, weight, rows, sizes)
    thread, _, _ = cute.arch.thread_idx()
    block, rank, _ = cute.arch.block_idx()
    layout = cute.make_layout((MAX_ROWS, sizes.columns), stride=(sizes.columns, 1))
    deltas, prefixes = cute.make_tensor(delta_out, layout), cute.make_tensor(prefix, layout)
    for number in cutlass.range_constexpr(sizes.outputs_a_thread):
        place = number * sizes.threads + thread
        row, column = place // sizes.block_n, place % sizes.block_n
        n = block * sizes.block_n + column
        if (rank == 0) & (row < rows) & (n < sizes.columns):
            delta = total(collected, column, row, sizes).to(BFloat16)
            deltas[row, n] = delta
            old = prefixes[row, n]
            if cutlass.const_expr(push):
                cute.make_tensor(pushed, layout)[row, n] = old
                prefixes[row, n] = delta
            else:
                prefixes[row, n] = (old.to(Float32) + delta.to(Float32)).to(BFloat16)
