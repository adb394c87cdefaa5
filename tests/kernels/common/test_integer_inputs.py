"""Rows of x as 8-bit weights take them: whole numbers of 16 bits, with a step for 32 columns."""

from __future__ import annotations

import pytest
import torch
from tile_products import as_multiplied, tile_dot

from kdecode.kernels.common.native import supported_isas

ISAS = pytest.mark.parametrize("isa", supported_isas())
LARGEST = 255 * 2.0**120  # of bf16


@ISAS
def test_numbers_down_to_a_128th_of_the_largest_are_exact(isa, random_matrix):
    """bf16 has 8 bits and a group's largest number 15, so the others have their 8 down to 2^-7."""
    made = random_matrix("int8_tiles", 33, 96)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(0, 8, (1, 96), generator=generator).double())
    signs = torch.randint(0, 2, (1, 96), generator=generator) * 2 - 1
    x = (signs * sizes * (1 + torch.randint(0, 128, (1, 96), generator=generator) / 128)).bfloat16()
    assert torch.equal(as_multiplied("int8_tiles", x), x.double())
    bound = (x.double().abs() @ made.dense.abs().T) * 96 * 2.0**-24
    error = tile_dot(isa, made.matrix, x).double() - x.double() @ made.dense.T
    assert (error.abs() <= bound).all()


@ISAS
def test_beside_a_large_number_small_ones_are_off_by_at_most_a_32768th_of_it(isa, integer_matrix):
    codes = torch.zeros(16, 64, dtype=torch.long)
    codes[:, 5] = 1  # the large number is not in the sum
    made = integer_matrix(codes, torch.ones(16, 2).bfloat16())
    for small in (1.0, 0.3, 1e-3, 1e-6):
        x = torch.zeros(1, 64).bfloat16()
        x[0, 5], x[0, 6], x[0, 37] = small, 1000.0, 3.0
        error = (tile_dot(isa, made.matrix, x) - x[0, 5].float()).abs()
        assert (error <= 1000.0 * 2.0**-15).all()


@ISAS
def test_the_largest_sums_do_not_overflow(isa, integer_matrix):
    codes = torch.full((16, 32), -128)
    codes[1::2] = 127
    made = integer_matrix(codes, torch.ones(16, 1).bfloat16())
    x = torch.full((1, 32), -255.0).bfloat16()
    assert torch.equal(tile_dot(isa, made.matrix, x).double(), x.double() @ made.dense.T)


@ISAS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinities_are_nan_in_every_sum_of_their_row(isa, bad, random_matrix):
    """Whatever the weight: an infinity times a code of 0 would be NaN, too."""
    made = random_matrix("int8_tiles", 32, 96)
    x = torch.randn(12, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    rest = [row for row in range(12) if row != 7]
    wanted = tile_dot(isa, made.matrix, x)
    x[7, 40] = bad
    y = tile_dot(isa, made.matrix, x)
    assert y[7].isnan().all()
    assert torch.equal(y[rest], wanted[rest])


@ISAS
def test_zeros_and_the_ends_of_the_range(isa, integer_matrix):
    made = integer_matrix(torch.full((16, 32), 3), torch.ones(16, 1).bfloat16())

    def sums(*numbers):
        x = torch.zeros(1, 32).bfloat16()
        x[0, : len(numbers)] = torch.tensor(numbers).bfloat16()
        y = tile_dot(isa, made.matrix, x)[0]
        assert (y == y[0]).all()
        return y[0].item()

    assert sums() == 0
    assert sums(0.0, -0.0) == 0
    assert sums(LARGEST / 4) == 3 * LARGEST / 4
    assert sums(LARGEST, LARGEST, -LARGEST, -LARGEST) == 0
    assert sums(2.0**-110, -(2.0**-113)) == 3 * 7 * 2.0**-113
    # Below 2^-112 steps grow no smaller than 2^-126, and numbers below half of one are 0.
    assert sums(2.0**-126, 2.0**-125) == 9 * 2.0**-126
    assert abs(sums(2.0**-127)) <= 3 * 2.0**-126
    assert abs(sums(2.0**-133)) <= 3 * 2.0**-126
    assert sums(1.0, 2.0**-133) == 3


def test_a_group_has_the_same_bits_on_every_instruction_set(random_matrix):
    """Sums of whole numbers have no order, and one group is one rounding of theirs."""
    made = random_matrix("int8_tiles", 48, 32)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = [tile_dot(isa, made.matrix, x) for isa in supported_isas()]
    assert all(torch.equal(y, found[0]) for y in found)
