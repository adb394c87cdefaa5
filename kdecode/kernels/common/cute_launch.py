"""One launch of a skinny product in CuTe DSL as data: what `triton_launch.py` is for Triton.

A `CuteLaunch` is made once, by an op's ``prepare``, from bound tensors; on torch's meta device it
cannot run and still says all that a compiler needs. CuTe DSL is imported when a launch runs or is
compiled. There is no interpreter: tests run the same launch through an imitation of its kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels.common.cute_tiles import MAX_ROWS, VECTOR, ProductSizes
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Problem


@dataclass(frozen=True)
class CuteLaunch:
    """kernel: a ``cute.jit`` function of the arguments, in order, then a stream, the sizes and the
    options. arch: "sm_90". It begins while the launch before it runs, to load weights, as Triton's
    launches do (`triton_launch.Launch`).
    """

    kernel: Any
    arch: str
    sizes: ProductSizes
    arguments: Mapping[str, Tensor | int]
    options: Mapping[str, bool] = field(default_factory=dict)

    # One stage: no loads of a later round are under way while a round is multiplied.
    num_stages = 1
    begins_early = True

    @property
    def grid(self) -> tuple[int, int]:
        return self.sizes.blocks, self.sizes.tile.split

    @property
    def num_warps(self) -> int:
        return self.sizes.tile.warps

    @property
    def constants(self) -> Mapping[str, int | bool]:
        """Names as Triton's kernels have them."""
        sizes = self.sizes
        return {
            "COLUMNS": sizes.columns,
            "INNER": sizes.inner,
            "BLOCK_R": MAX_ROWS,
            "BLOCK_N": sizes.block_n,
            "BLOCK_K": sizes.block_columns,
            "SPLIT": sizes.tile.split,
            **{name.upper(): value for name, value in self.options.items()},
        }

    def run(self) -> None:
        """One launch on torch's current stream; the first run of a kernel also compiles it."""
        from kdecode.kernels.common.cute_compile import compile_job, compiled, runtime_arguments

        stream = torch.cuda.current_stream().cuda_stream
        compiled(compile_job(self, self.arch))(*runtime_arguments(self.arguments, stream))


@dataclass(frozen=True)
class CuteStep:
    """A prepared step of one launch."""

    launch: CuteLaunch

    @property
    def launches(self) -> tuple[CuteLaunch, ...]:
        return (self.launch,)

    def run(self) -> None:
        self.launch.run()


def refuse_product(problem: Problem, inner: int) -> list[str]:
    """Reasons of a product whose rows of W have so many input columns."""
    reasons = []
    if problem.rows is None or problem.rows > MAX_ROWS:
        rows = "any number of" if problem.rows is None else str(problem.rows)
        reasons.append(
            f"The kernels in CuTe DSL take 1 to {MAX_ROWS} rows, as many as one instruction; this "
            f"has {rows}."
        )
    if inner % VECTOR:
        reasons.append(
            f"The kernels in CuTe DSL load {VECTOR} input columns at a time; there are {inner}."
        )
    return reasons


def aligned(tensor: Tensor, name: str) -> Tensor:
    """The tensor, once it begins where 16 bytes can be loaded; ValueError otherwise."""
    offset = tensor.storage_offset() * tensor.element_size()
    if offset % 16 or (not tensor.is_meta and tensor.data_ptr() % 16):
        raise ValueError(
            f"{name} begins {offset} bytes into its memory; the kernels in CuTe DSL load 16 bytes "
            "at a time from multiples of 16."
        )
    return tensor


def weights_of(matrix: Matrix, shape: tuple[int, int], name: str) -> Tensor:
    """The data of a bf16 matrix in format "rows" of a known size."""
    from kdecode.kernels.common.triton_launch import row_major

    return aligned(row_major(matrix, shape, name), name)
