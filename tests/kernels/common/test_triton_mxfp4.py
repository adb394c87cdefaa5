"""MXFP4 in registers: every code with every scale, bit by bit, and sums of products of codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton_cases import DEVICE

from kdecode.kernels.common.matrix import pack_mxfp4_rows, to_rows
from kdecode.kernels.common.triton_mxfp4 import SUM_FACTOR, dequantised, multiplied, scale_value

ROWS, COLS = 64, 128


@triton.jit
def _unpack(data, scales, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    n = tl.arange(0, ROWS)[:, None]
    words = tl.load(data + n * (COLS // 8) + tl.arange(0, COLS // 8)[None, :])
    scale = tl.load(scales + n * (COLS // 32) + tl.arange(0, COLS // 32)[None, :])
    k = tl.arange(0, COLS)[None, :]
    tl.store(out + n * COLS + k, dequantised(words, scale, ROWS, COLS))


@triton.jit
def _multiply(data, scales, x, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    n = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS // 8)[None, :]
    words = tl.load(data + n * (COLS // 8) + k)
    at = x + 4 * k
    part = multiplied(words, tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    scale = scale_value(tl.load(scales + n * (COLS // 32) + k // 4))
    tl.store(out + tl.arange(0, ROWS), tl.sum(part * scale, axis=1) * SUM_FACTOR)


def _random(scale_bytes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes as words, scales, and the numbers, on the device."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (ROWS, COLS // 2), generator=generator).to(torch.uint8)
    count = ROWS * COLS // 32
    scales = torch.arange(count) % (scale_bytes[1] - scale_bytes[0] + 1) + scale_bytes[0]
    scales = scales.view(ROWS, COLS // 32).to(torch.uint8)
    numbers = to_rows(pack_mxfp4_rows([(codes, scales)]))
    return codes.view(torch.int32).to(DEVICE), scales.to(DEVICE), numbers.to(DEVICE)


def test_codes_become_the_numbers_of_the_checkpoint() -> None:
    """Scales 1 to 252: all that weights are packed with. Zero keeps its sign."""
    words, scales, numbers = _random((1, 252))
    out = torch.full((ROWS, COLS), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    _unpack[(1,)](words, scales, out, ROWS, COLS)
    assert torch.equal(out.view(torch.int16), numbers.view(torch.int16))


def test_products_of_codes_are_exact() -> None:
    """Inputs of one significant bit and scales of one size: no sum has more digits than fp32."""
    words, scales, numbers = _random((100, 101))
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (COLS,), generator=generator).to(torch.bfloat16).to(DEVICE)
    out = torch.full((ROWS,), float("nan"), device=DEVICE)
    _multiply[(1,)](words, scales, x.view(torch.int32), out, ROWS, COLS)
    assert torch.equal(out.double(), numbers.double() @ x.double())
