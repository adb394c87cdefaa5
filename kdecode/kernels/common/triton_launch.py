"""One launch of a Triton kernel as data: what a step of a CUDA plan is.

A `Launch` is made once, by an op's ``prepare``, from bound tensors; ``run`` launches it. Made from
tensors on torch's meta device it cannot run, and still says all that a compiler needs: so a plan of
any shape is compiled for any architecture on a machine without a GPU (`triton_compile.py`).

With TRITON_INTERPRET=1 in the environment when Triton is imported, kernels run in its interpreter,
on tensors of the CPU, one program after another: no kernel may wait for another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Problem

# Rows that a kernel is specialised for; a step of R rows takes the smallest that holds them.
ROW_BLOCKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Launch:
    """kernel: a ``triton.jit`` function. arguments: by parameter name; tensors, ints and floats.
    constants: its ``tl.constexpr`` parameters. A zero-sized grid is refused. begins_early: the
    launch may begin while the one before it runs, to load weights; what it may do before the other
    is over is with `triton_ops.wait_for_previous`, which such a kernel calls.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    begins_early: bool = False

    def __post_init__(self) -> None:
        if not self.grid or min(self.grid) < 1:
            raise ValueError(f"A launch has a grid of at least one program; this is {self.grid}.")

    def run(self) -> None:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Triton's interpreter has one launch after another, and not this option.
        if self.begins_early and isinstance(self.kernel, JITFunction):
            options["launch_pdl"] = True
        self.kernel[self.grid](**self.arguments, **self.constants, **options)


@dataclass(frozen=True)
class TritonStep:
    """A prepared step: one launch, and what has to stay alive for it beside its arguments.

    then: launches that follow it, where a step of many rows needs them.
    """

    launch: Launch
    alive: tuple[object, ...] = ()
    then: tuple[Launch, ...] = ()

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.launch, *self.then

    def run(self) -> None:
        for launch in self.launches:
            launch.run()

    def late(self) -> TritonStep:
        """The same, with launches that begin when all is over that they come after.

        For a step beside which another stream runs: what a launch would begin early after is the
        one before it on its own stream.
        """
        first, *others = (replace(launch, begins_early=False) for launch in self.launches)
        return replace(self, launch=first, then=tuple(others))


def row_block(rows: int) -> int:
    """The smallest number of `ROW_BLOCKS` that is at least ``rows``; ValueError above the last."""
    for block in ROW_BLOCKS:
        if rows <= block:
            return block
    raise ValueError(f"{rows} rows; the kernels of a plan take at most {ROW_BLOCKS[-1]}.")


def tensor_for(
    tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, name: str = "tensor"
) -> Tensor:
    """The tensor itself, once its dtype, shape and contiguity are what a kernel reads.

    ValueError otherwise: a kernel gets a bare pointer and would read past it.
    """
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; the kernel takes {dtype} "
            f"{list(shape)}, contiguous."
        )
    return tensor


def divide_up(size: int, block: int) -> int:
    """Blocks that cover ``size``."""
    return int(triton.cdiv(size, block))


def row_major(matrix: Matrix, shape: tuple[int, int], name: str) -> Tensor:
    """The data of a bf16 matrix in format "rows" of a known size."""
    if matrix.format != "rows":
        raise ValueError(f"{name} is in {matrix.format}; the CUDA kernels read rows of bf16.")
    return tensor_for(matrix.data, torch.bfloat16, shape, name=name)


def plan_rows(problem: Problem) -> int:
    """The rows of a step that has been accepted; ValueError for a plan of any number of rows."""
    reasons = refuse_plan_rows(problem)
    if problem.rows is None or reasons:
        raise ValueError(" ".join(reasons))
    return problem.rows


def refuse_plan_rows(problem: Problem) -> list[str]:
    """Reasons that concern the number of rows."""
    if problem.rows is None:
        return ["The steps of a CUDA plan are built for a fixed number of rows."]
    if not 1 <= problem.rows <= ROW_BLOCKS[-1]:
        return [
            f"The steps of a CUDA plan take 1 to {ROW_BLOCKS[-1]} rows; this has {problem.rows}."
        ]
    return []
