"""projection in CuTe DSL, for up to 8 rows: `common/cute_product.py`, and one rounding.

Annotations are objects here: the compiler reads them.
"""

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, cute

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
from kdecode.kernels.projection.op import ProjectionWeights


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = refuse_product(problem, problem.config.hidden_size)
    if problem.layer is None and not problem.ranks.is_alone:
        reasons.append(
            f"The kernel of the head in CuTe DSL exchanges nothing, and there are "
            f"{problem.ranks.size} ranks."
        )
    return reasons


def prepare(problem: Problem, weights: ProjectionWeights, buffers: Buffers) -> CuteStep:
    rows, (columns, inner) = plan_rows(problem), (weights.matrix.rows, weights.matrix.cols)
    source, out = buffers[weights.input], buffers[weights.output]
    dtype = torch.float32 if weights.is_head else torch.bfloat16
    x = tensor_for(source, torch.bfloat16, (rows, inner), name=weights.input)
    arguments = {
        "x": aligned(x, weights.input),
        "weight": weights_of(weights.matrix, (columns, inner), f"the matrix of {weights.output}"),
        "out": tensor_for(out, dtype, (rows, columns), name=weights.output),
        "rows": rows,
    }
    sizes = product_sizes("projection", problem.arch, columns, inner)
    return CuteStep(CuteLaunch(projection, problem.arch, sizes, arguments))


@cute.jit
def projection(
    x: cute.Pointer,
    weight: cute.Pointer,
    out: cute.Pointer,
    rows: Int32,
    stream: CUstream,
    sizes: cutlass.Constexpr,
) -> None:
    product_launch(sizes, _projection(x, weight, out, rows, sizes), stream)


@cute.kernel
def _projection(
    x: cute.Pointer,
    weight: cute.Pointer,
    out: cute.Pointer,
    rows: Int32,
    sizes: cutlass.Constexpr,
) -> None:
    """Rounded to bf16, also where the buffer is fp32."""
    collected = sum_parts(x, weight, rows, sizes)
    thread, _, _ = cute.arch.thread_idx()
    block, rank, _ = cute.arch.block_idx()
    written = cute.make_tensor(
        out, cute.make_layout((MAX_ROWS, sizes.columns), stride=(sizes.columns, 1))
    )
    for number in cutlass.range_constexpr(sizes.outputs_a_thread):
        place = number * sizes.threads + thread
        row, column = place // sizes.block_n, place % sizes.block_n
        n = block * sizes.block_n + column
        if (rank == 0) & (row < rows) & (n < sizes.columns):
            rounded = total(collected, column, row, sizes).to(BFloat16)
            written[row, n] = rounded.to(written.element_type)
