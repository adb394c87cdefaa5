"""Skinny products in CuTe DSL: y = x W^T for up to 8 rows of x, W read once from where it lies.

Device functions: the warps of a cluster each sum a part of the input columns (`cute_tiles.py` says
which lane loads what), leave their sums in the shared memory of the cluster's first program, over
the cluster's network where there are several, and that program adds the parts in order. Neither
memory of the device nor counters are used. Weights are asked for before the launch before this one
is over: the first round of them into registers, the rest into the second-level cache. Knows no op.

Annotations are objects here: the compiler reads them.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from kdecode.kernels.common.cute_tiles import (
    CHUNK,
    INPUT_MODES,
    INPUT_STRIDES,
    LANES,
    MAX_ROWS,
    MMA_M,
    MMA_SHAPE,
    STEP_STRIDE,
    STEPS,
    SUM_MODES,
    VECTOR,
    WEIGHT_MODES,
    WEIGHT_STRIDES,
    ProductSizes,
    lane_column,
    lane_row,
    sum_place,
)


@cute.jit
def sum_parts(
    x: cute.Pointer, weight: cute.Pointer, rows: Int32, sizes: cutlass.Constexpr
) -> cute.Tensor:
    """The sums of each part [columns of a block, rows, parts], in a cluster's first program.

    The launch before this one is over when it returns.
    """
    split: cutlass.Constexpr = sizes.tile.split
    if cutlass.const_expr(split > 1):
        # No program may write into one that has not begun.
        cute.arch.cluster_arrive_relaxed()
    thread, _, _ = cute.arch.thread_idx()
    block, rank, _ = cute.arch.block_idx()
    lane, warp = thread % LANES, thread // LANES
    part = rank * sizes.tile.warps + warp
    begin = part * sizes.part_columns
    # A part without columns has those before the matrix's end, times zeros.
    end = cutlass.min(begin + sizes.part_columns, Int32(sizes.inner))
    weights = _lines(weight, sizes.columns, sizes)
    if cutlass.const_expr(sizes.rounds > 1):
        _prefetch(weights, block, lane, begin + sizes.block_columns, end, sizes)
    held = cute.make_rmem_tensor((VECTOR, 2 * sizes.tile.tiles, sizes.tile.chunks), BFloat16)
    _load_weights(weights, held, block, lane, begin, end, sizes)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    sums = _multiply(
        _lines(x, MAX_ROWS, sizes), weights, held, rows, block, lane, begin, end, sizes
    )
    memory = cutlass.memory.SmemAllocator()
    shape = (sizes.block_n, MAX_ROWS, sizes.parts)
    collected = memory.allocate_tensor(Float32, cute.make_layout(shape), 16)
    _collect(sums, collected, lane, part, sizes)
    return collected


@cute.jit
def total(collected: cute.Tensor, column: Int32, row: Int32, sizes: cutlass.Constexpr) -> Float32:
    """The sum of all parts of one output, in their order."""
    value = collected[column, row, 0]
    for part in cutlass.range_constexpr(1, sizes.parts):
        value = value + collected[column, row, part]
    return value


def product_launch(sizes: ProductSizes, kernel: Any, stream: Any) -> None:
    """Launches a kernel of these sizes, early."""
    split = sizes.tile.split
    kernel.launch(
        grid=(sizes.blocks, split, 1),
        block=(sizes.threads, 1, 1),
        cluster=(1, split, 1) if split > 1 else None,
        smem=sizes.shared_bytes,
        stream=stream,
        use_pdl=True,
    )


def _lines(pointer: cute.Pointer, lines: int, sizes: ProductSizes) -> cute.Tensor:
    """Rows of vectors: [lines, (vector, vectors of a row)]."""
    shape = (lines, (VECTOR, sizes.inner // VECTOR))
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=(sizes.inner, (1, VECTOR))))


def _weight_row(block: Int32, lane: Int32, number: int, sizes: ProductSizes) -> Int64:
    """The row of a lane's vector of this number; behind the last row of W that one again."""
    row = block * sizes.block_n + number * (MMA_M // 2) + lane_row(lane)
    return Int64(cutlass.min(row, Int32(sizes.columns - 1)))


@cute.jit
def _load_weights(
    weights: cute.Tensor,
    held: cute.Tensor,
    block: Int32,
    lane: Int32,
    start: Int32,
    end: Int32,
    sizes: cutlass.Constexpr,
) -> None:
    """A round's vectors of W, from column ``start`` on; behind ``end`` the last ones before it."""
    for chunk in cutlass.range_constexpr(sizes.tile.chunks):
        column = cutlass.min(start + chunk * CHUNK + lane_column(lane), end - VECTOR)
        for number in cutlass.range_constexpr(2 * sizes.tile.tiles):
            row = _weight_row(block, lane, number, sizes)
            source = weights[row, (None, column // VECTOR)]
            cute.autovec_copy(source, held[None, number, chunk])


@cute.jit
def _load_inputs(
    inputs: cute.Tensor,
    held: cute.Tensor,
    rows: Int32,
    lane: Int32,
    start: Int32,
    end: Int32,
    sizes: cutlass.Constexpr,
) -> None:
    """A round's vectors of x; zeros for rows that there are not, and behind ``end``."""
    words = cute.recast_tensor(held, Int32)
    row = lane_row(lane)
    for chunk in cutlass.range_constexpr(sizes.tile.chunks):
        column = start + chunk * CHUNK + lane_column(lane)
        inside = (row < rows) & (column < end)
        place = cutlass.min(column, end - VECTOR) // VECTOR
        source = inputs[cutlass.min(row, rows - 1), (None, place)]
        cute.autovec_copy(source, held[None, chunk])
        # All bits or none.
        mask = -Int32(inside)
        for word in cutlass.range_constexpr(VECTOR // 2):
            words[word, chunk] = words[word, chunk] & mask


@cute.jit
def _multiply(
    inputs: cute.Tensor,
    weights: cute.Tensor,
    held: cute.Tensor,
    rows: Int32,
    block: Int32,
    lane: Int32,
    begin: Int32,
    end: Int32,
    sizes: cutlass.Constexpr,
) -> cute.Tensor:
    """A lane's sums of its warp's part. held: the first round's weights."""
    tiles: cutlass.Constexpr = sizes.tile.tiles
    chunks: cutlass.Constexpr = sizes.tile.chunks
    sums = cute.make_rmem_tensor((SUM_MODES, tiles, 1), Float32)
    sums.fill(0.0)
    loaded = cute.make_rmem_tensor((VECTOR, chunks), BFloat16)
    # The loaded vectors as the instruction's operands, one after another: only other strides.
    left = cute.make_tensor(
        held.iterator,
        cute.make_layout(
            (WEIGHT_MODES, tiles, (STEPS, chunks)),
            stride=(WEIGHT_STRIDES, 2 * VECTOR, (STEP_STRIDE, 2 * VECTOR * tiles)),
        ),
    )
    right = cute.make_tensor(
        loaded.iterator,
        cute.make_layout(
            (INPUT_MODES, 1, (STEPS, chunks)), stride=(INPUT_STRIDES, 0, (STEP_STRIDE, VECTOR))
        ),
    )
    multiply = cute.make_tiled_mma(cute.nvgpu.warp.MmaF16BF16Op(BFloat16, Float32, MMA_SHAPE))
    for number in cutlass.range(sizes.rounds, unroll=1):
        start = begin + number * sizes.block_columns
        _load_inputs(inputs, loaded, rows, lane, start, end, sizes)
        for step in cutlass.range_constexpr(STEPS * chunks):
            cute.gemm(multiply, sums, left[None, None, step], right[None, None, step], sums)
        if number + 1 < sizes.rounds:
            _load_weights(weights, held, block, lane, start + sizes.block_columns, end, sizes)
    return sums


@cute.jit
def _collect(
    sums: cute.Tensor, collected: cute.Tensor, lane: Int32, part: Int32, sizes: cutlass.Constexpr
) -> None:
    """Every warp's sums into the first program, and waits for all of them."""
    split: cutlass.Constexpr = sizes.tile.split
    if cutlass.const_expr(split > 1):
        cute.arch.cluster_wait()
    for tile in cutlass.range_constexpr(sizes.tile.tiles):
        for half in cutlass.range_constexpr(SUM_MODES[1]):
            for pair in cutlass.range_constexpr(SUM_MODES[0]):
                column, row = sum_place(lane, pair, half)
                place = (column + tile * MMA_M, row, part)
                value = sums[(pair, half), tile, 0]
                if cutlass.const_expr(split > 1):
                    own = collected.iterator + cute.crd2idx(place, collected.layout)
                    _store_in_first(own, value)
                else:
                    collected[place] = value
    if cutlass.const_expr(split > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@cute.jit
def _prefetch(
    weights: cute.Tensor,
    block: Int32,
    lane: Int32,
    start: Int32,
    end: Int32,
    sizes: cutlass.Constexpr,
) -> None:
    """What a warp reads of W from ``start`` on into the second-level cache, a row a lane."""
    for number in cutlass.range_constexpr((sizes.block_n + LANES - 1) // LANES):
        line = number * LANES + lane
        if (line < sizes.block_n) & (start < end):
            row = cutlass.min(block * sizes.block_n + line, Int32(sizes.columns - 1))
            source = weights[Int64(row), (None, start // VECTOR)]
            _prefetch_bytes(source.iterator, (end - start) * (BFloat16.width // 8))


@dsl_user_op
def _prefetch_bytes(pointer: Any, num_bytes: Any, *, loc: Any = None, ip: Any = None) -> None:
    """A hint to the copy engine. Both are multiples of 16."""
    operands = [pointer.toint(loc=loc, ip=ip), num_bytes]
    _assembly("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", operands, loc, ip)


@dsl_user_op
def _store_in_first(pointer: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """fp32 into the first program of a cluster, to where ``pointer`` is in one's own."""
    text = """{
        .reg .b32 first;
        mapa.shared::cluster.u32 first, $0, 0;
        st.shared::cluster.f32 [first], $1;
    }"""
    _assembly(text, "r,f", [pointer.toint(loc=loc, ip=ip), value], loc, ip)


def _assembly(text: str, constraints: str, operands: list[Any], loc: Any, ip: Any) -> None:
    """What the language has no words for."""
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
