"""prefetch in Triton: a thread asks for lines of memory and waits for none of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.triton_launch import Launch, TritonStep, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import prefetch
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.prefetch.op import PrefetchUse, refuse_arch, spans

# Bytes that one request brings.
LINE_BYTES = 128
# Lines of a program, a few a thread: programs that are gone soon leave their processors to others.
BLOCK_LINES = 1024
# Parameters of the kernel, below.
MOST_MATRICES = 4
_NAMES = ("first", "second", "third", "fourth")


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_arch(problem.arch)


def prepare(problem: Problem, weights: PrefetchUse, buffers: Buffers) -> TritonStep:
    """Of as many matrices as the kernel has parameters. Nothing of ``buffers`` is used."""
    found = list(spans(weights, problem.arch))
    if not 1 <= len(found) <= MOST_MATRICES:
        raise ValueError(f"{len(found)} matrices; one prefetch takes 1 to {MOST_MATRICES}.")
    lines = [divide_up(num_bytes, LINE_BYTES) for _, num_bytes in found]
    tensors = [_bytes(matrix) for matrix, _ in found]
    arguments: dict[str, Tensor | int] = {}
    for place, name in enumerate(_NAMES):
        is_used = place < len(found)
        arguments[name] = tensors[place if is_used else 0]
        arguments[f"{name}_lines"] = lines[place] if is_used else 0
    grid = (divide_up(max(lines), BLOCK_LINES), len(found))
    return TritonStep(Launch(prefetch_weights, grid, arguments, {"BLOCK_LINES": BLOCK_LINES}))


def _bytes(matrix: Matrix) -> Tensor:
    """A matrix in "rows", as memory."""
    if matrix.format != "rows":
        raise ValueError(f"A matrix is in {matrix.format}; a prefetch takes rows.")
    data = tensor_for(matrix.data, torch.bfloat16, tuple(matrix.data.shape), name="a matrix")
    return data.view(torch.uint8)


@triton.jit
def _ask(weights, lines, BLOCK_LINES: tl.constexpr, LINE: tl.constexpr):
    """This program's lines; behind the last one of the matrix that one again."""
    begin = tl.program_id(0) * BLOCK_LINES
    if begin < lines:
        line = tl.minimum(begin + tl.arange(0, BLOCK_LINES), lines - 1)
        prefetch(weights + line.to(tl.int64) * LINE)


_LINE = tl.constexpr(LINE_BYTES)


@triton.jit(do_not_specialize=["first_lines", "second_lines", "third_lines", "fourth_lines"])
def prefetch_weights(
    first,
    second,
    third,
    fourth,
    first_lines,
    second_lines,
    third_lines,
    fourth_lines,
    BLOCK_LINES: tl.constexpr,
):
    """A row of programs for each matrix, as many as the longest one needs."""
    matrix = tl.program_id(1)
    if matrix == 0:
        _ask(first, first_lines, BLOCK_LINES, _LINE)
    elif matrix == 1:
        _ask(second, second_lines, BLOCK_LINES, _LINE)
    elif matrix == 2:
        _ask(third, third_lines, BLOCK_LINES, _LINE)
    else:
        _ask(fourth, fourth_lines, BLOCK_LINES, _LINE)
