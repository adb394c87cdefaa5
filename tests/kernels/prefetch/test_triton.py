"""prefetch in Triton: which lines of memory it asks for, and of how much.

Of what is asked for nothing comes back. So what asks is replaced here by a function that marks
a line, and the memory of a matrix shows which ones those were.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_cases import DEVICE, k3_config, make_case

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.prefetch import op, triton_impl
from kdecode.kernels.prefetch.op import L2_BYTES, PrefetchUse, most_bytes, spans
from kdecode.kernels.prefetch.triton_impl import LINE_BYTES, prepare, refuse

# Rows and columns of bf16; none is a whole number of programs, some are none of lines.
SHAPES = ((100, 72), (3, 40), (64, 64), (1, 8))
# Bytes around a matrix that are not its own.
GUARD = 4096


@triton.jit
def mark(pointers):
    """In place of `prefetch`, which leaves nothing to see."""
    tl.store(pointers, 1)


@pytest.fixture
def marking() -> ModuleType:
    """The implementation anew, with kernels that mark what they would ask for."""
    spec = importlib.util.spec_from_file_location("marking_prefetch", triton_impl.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prefetch = mark  # type: ignore[attr-defined]
    return module


def problem(arch: str = "sm_90") -> Problem:
    return replace(make_case(k3_config()).problem(1, 1), arch=arch)


def zeros(*shapes: tuple[int, int]) -> list[tuple[Matrix, Tensor]]:
    """Matrices of zeros, each with the larger block that it lies in."""
    found = []
    for rows, columns in shapes:
        block = torch.zeros(2 * GUARD + 2 * rows * columns, dtype=torch.uint8, device=DEVICE)
        data = block[GUARD:-GUARD].view(torch.bfloat16).view(rows, columns)
        found.append((Matrix("rows", rows, columns, data), block))
    return found


def asked(block: Tensor) -> list[int]:
    """Where lines that were asked for begin in the matrix of a block."""
    return (torch.nonzero(block.cpu()).flatten() - GUARD).tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_line_of_every_matrix_and_no_other(marking: ModuleType, count: int) -> None:
    marking.BLOCK_LINES = 32  # type: ignore[attr-defined]
    made = zeros(*SHAPES[:count])
    marking.prepare(problem(), PrefetchUse(tuple(matrix for matrix, _ in made)), Buffers()).run()
    for matrix, block in made:
        assert asked(block) == list(range(0, matrix.num_bytes, LINE_BYTES))


def test_no_more_than_an_architecture_has_room_for(
    monkeypatch: pytest.MonkeyPatch, marking: ModuleType
) -> None:
    """The first matrix whole, two lines of the second, nothing of the third."""
    made = zeros(SHAPES[0], SHAPES[0], SHAPES[0])
    size = made[0][0].num_bytes
    monkeypatch.setattr(op, "L2_BYTES", {"sm_90": 4 * (size + 200)})
    marking.prepare(problem(), PrefetchUse(tuple(matrix for matrix, _ in made)), Buffers()).run()
    whole = list(range(0, size, LINE_BYTES))
    assert [asked(block) for _, block in made] == [whole, [0, LINE_BYTES], []]


def test_nothing_is_changed() -> None:
    """As plans run it: on the device, or in the interpreter."""
    values = torch.randn(100, 72).to(torch.bfloat16).to(DEVICE)
    matrix = Matrix("rows", 100, 72, values.clone())
    prepare(problem(), PrefetchUse((matrix,)), Buffers()).run()
    assert torch.equal(matrix.data, values)


def test_the_bound_is_a_part_of_the_cache_of_an_architecture() -> None:
    data = torch.empty(1 << 14, 1 << 12, dtype=torch.bfloat16, device="meta")
    matrix = Matrix("rows", 1 << 14, 1 << 12, data)
    for arch, size in L2_BYTES.items():
        assert list(spans(PrefetchUse((matrix, matrix)), arch)) == [(matrix, most_bytes(arch))]
        assert 2 * most_bytes(arch) <= size
    assert refuse(problem("sm_90")) == []
    (reason,) = refuse(problem("sm_120"))
    assert "is known of sm_90, sm_100, sm_103, and not of sm_120" in reason


def test_what_no_launch_takes_is_an_error() -> None:
    codes = torch.zeros(32, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="A matrix is in mxfp4_rows; a prefetch takes rows"):
        prepare(problem(), PrefetchUse((Matrix("mxfp4_rows", 32, 32, codes),)), Buffers())
    many = tuple(matrix for matrix, _ in zeros(*SHAPES, SHAPES[0]))
    with pytest.raises(ValueError, match="5 matrices; one prefetch takes 1 to 4"):
        prepare(problem(), PrefetchUse(many), Buffers())
