"""Inputs as two E4M3 numbers, and products of MXFP4 codes with them, number by number."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DEVICE

from kdecode.kernels.common.matrix import pack_mxfp4_rows, to_rows
from kdecode.kernels.common.triton_scaled import scaled_products, two_parts

ROWS, COLS = 16, 128


@triton.jit
def _split(x, upper, lower, scales, ROWS: tl.constexpr, COLS: tl.constexpr):
    n = tl.arange(0, ROWS)[:, None]
    at = n * COLS + tl.arange(0, COLS)[None, :]
    high, low, scale = two_parts(tl.load(x + at), ROWS, COLS)
    tl.store(upper + at, high.to(tl.uint8, bitcast=True))
    tl.store(lower + at, low.to(tl.uint8, bitcast=True))
    tl.store(scales + n * (COLS // 32) + tl.arange(0, COLS // 32)[None, :], scale)


@triton.jit
def _multiply(
    x,
    data,
    scales,
    out,
    count,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row, line = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    has_row = row < count
    at, lines = row.to(tl.int64) * INNER, line.to(tl.int64)
    sums = scaled_products(x, at, has_row, data, scales, lines, INNER, BLOCK_N, BLOCK_K)
    tl.store(out + line[:, None] * BLOCK_R + row[None, :], sums)


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower parts with their scales, in fp64."""
    codes = [torch.full(x.shape, 0x55, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = torch.full((ROWS, COLS // 32), 0xFF, dtype=torch.uint8, device=DEVICE)
    _split[(1,)](x.to(DEVICE), *codes, scales, ROWS, COLS)
    factors = torch.exp2(scales.cpu().double() - 127).repeat_interleave(32, dim=1)
    upper, lower = (part.cpu().view(torch.float8_e4m3fn).double() * factors for part in codes)
    return upper, lower


def _numbers(spread: int, seed: int = 0) -> torch.Tensor:
    """bf16 of any mantissa and sign, over so many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(0, spread, (ROWS, COLS), generator=generator)
    mantissa = 128 + torch.randint(0, 128, (ROWS, COLS), generator=generator)
    sign = 1 - 2 * torch.randint(0, 2, (ROWS, COLS), generator=generator)
    return (sign * mantissa * torch.exp2(size.double() - 20)).to(torch.bfloat16)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Of each number's 32 columns the power of two in the largest."""
    largest = x.double().abs().unflatten(1, (-1, 32)).amax(2, keepdim=True)
    return torch.exp2(largest.log2().floor()).expand(-1, -1, 32).flatten(1)


def test_numbers_of_ten_binades_are_exact() -> None:
    x = _numbers(spread=10)
    upper, lower = _parts(x)
    assert torch.equal(upper + lower, x.double())
    assert (lower != 0).sum() > ROWS * COLS // 2


def test_smaller_numbers_are_off_by_what_is_said() -> None:
    x = _numbers(spread=40)
    error = (sum(_parts(x)) - x.double()).abs()
    largest = _largest(x)
    assert torch.all(error <= largest * 2.0**-16)
    assert torch.all(error[x.double().abs() >= largest * 2.0**-9] == 0)
    # The bound is not a loose one.
    assert error.div(largest).max() > 2.0**-18


def test_numbers_at_both_ends_of_bf16() -> None:
    """Zeros, the smallest normal numbers, the largest."""
    x = torch.zeros(ROWS, COLS, dtype=torch.bfloat16)
    smallest, largest = 2.0**-126, torch.finfo(torch.bfloat16).max
    x[1], x[2, ::2], x[3], x[3, 1] = smallest, -smallest, largest, 2.0**118
    x[4, 5] = -0.0
    upper, lower = _parts(x)
    assert torch.equal(upper + lower, x.double())


def test_what_is_no_number_stays_in_its_32_columns() -> None:
    x = _numbers(spread=4)
    x[0, 3], x[1, 40], x[2, 127] = float("nan"), float("inf"), float("-inf")
    upper, lower = _parts(x)
    total = upper + lower
    assert total[0, 3].isnan()
    assert total[1, 32:64].isnan().all()
    assert total[2, 96:].isnan().all()
    kept = torch.ones(ROWS, COLS, dtype=torch.bool)
    kept[0, :32] = kept[1, 32:64] = kept[2, 96:] = False
    assert torch.equal(total[kept], x.double()[kept])


@pytest.mark.parametrize("inner", [96, 128, 320])
def test_products_are_those_of_the_numbers(inner: int) -> None:
    """Matrices whose last block is not full; rows that there are not are not read."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (128, inner // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 126, (128, inner // 32), generator=generator).to(torch.uint8)
    weight = to_rows(pack_mxfp4_rows([(codes, scales)])).double()
    x = torch.randn(16, inner, generator=generator).to(torch.bfloat16)
    x[11:] = float("nan")
    out = torch.full((128, 16), float("nan"), device=DEVICE)
    arguments = (tensor.to(DEVICE) for tensor in (x, codes, scales))
    _multiply[(1,)](*arguments, out, 11, inner, 128, 128, 16)
    gold = weight @ x[:11].double().T
    error = out.cpu().double()[:, :11] - gold
    assert error.square().mean().sqrt() <= 2e-5 * gold.square().mean().sqrt()
    assert torch.all(out[:, 11:] == 0)
