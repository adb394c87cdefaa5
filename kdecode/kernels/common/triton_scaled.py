"""Products of MXFP4 weights by the tensor cores' instruction for numbers with scales (Blackwell).

Device functions. The instruction takes codes and scales as a checkpoint has them, and of inputs
E4M3 numbers with a scale for 32 columns. bf16 has 8 significant bits and E4M3 has 4, so an input is
two numbers of one scale: its upper bits and what they leave. With 2^e the power of two in the
largest of the 32, inputs from 2^(e - 9) on are exact, and smaller ones off by at most 2^(e - 16).
Products are exact, sums fp32. Knows no op.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.triton_mla import e4m3_bits
from kdecode.kernels.common.triton_mxfp4 import CODE_FACTOR, scale_value
from kdecode.kernels.common.triton_ops import IS_INTERPRETED


@triton.jit
def _e4m3(x):
    """fp32 in E4M3; in the interpreter, which rounds otherwise, its code."""
    if IS_INTERPRETED:
        return e4m3_bits(x)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def two_parts(x, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """bf16 [ROWS, BLOCK_K] -> upper and lower parts in E4M3 [ROWS, BLOCK_K], and the E8M0 scales of
    both, uint8 [ROWS, BLOCK_K / 32]. An infinity makes its 32 columns NaN."""
    wide = tl.reshape(x.to(tl.float32), [ROWS, BLOCK_K // 32, 32])
    largest = tl.max(tl.abs(wide), axis=2)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    # The largest number becomes one of 128 to 256; the bias of scales is that of fp32.
    scale = tl.maximum(exponent - 7, 1)
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(exponent == 255, float("nan"), factor)
    scaled = wide * factor[:, :, None]
    # Cut off behind the third bit of mantissa: what is left is exact.
    upper = (scaled.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    lower = _e4m3(tl.reshape(scaled - upper, [ROWS, BLOCK_K]))
    return _e4m3(tl.reshape(upper, [ROWS, BLOCK_K])), lower, scale.to(tl.uint8)


@triton.jit
def _code_values(codes):
    """Codes uint8 [N, K / 2] in fp32 [N, K], without their scales."""
    nibbles = tl.join(codes & 0xF, codes >> 4).to(tl.uint32)
    nibbles = tl.reshape(nibbles, [codes.shape[0], 2 * codes.shape[1]])
    bits = ((nibbles & 8) << 28) | ((nibbles & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * CODE_FACTOR


@triton.jit
def _e4m3_values(codes):
    """E4M3 codes in fp32."""
    size = (codes & 0x7F).to(tl.uint32)
    value = (size << 20).to(tl.float32, bitcast=True) * 2.0**120
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where((codes & 0x80) != 0, -value, value)


@triton.jit
def _with_scales(values, scales):
    """fp32 [N, K] times E8M0 [N, K / 32]."""
    groups = tl.reshape(values, [scales.shape[0], scales.shape[1], 32])
    return tl.reshape(groups * scale_value(scales)[:, :, None], values.shape)


@triton.jit
def scaled_dot(codes, scales, part, part_scales, acc):
    """acc + weights part^T, fp32 [N, R]. codes uint8 [N, K / 2], scales uint8 [N, K / 32]; part [R,
    K] and part_scales [R, K / 32] of `two_parts`."""
    if IS_INTERPRETED:
        weight = _with_scales(_code_values(codes), scales)
        inputs = _with_scales(_e4m3_values(part), part_scales)
        return acc + tl.dot(weight, tl.trans(inputs), input_precision="ieee")
    else:
        return tl.dot_scaled(codes, scales, "e2m1", tl.trans(part), part_scales, "e4m3", acc)


@triton.jit
def scaled_products(
    x,
    at,
    has_row,
    data,
    scales,
    lines,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Lines [BLOCK_N] of a matrix in MXFP4 times gathered inputs, fp32 [BLOCK_N, rows].

    x bf16; at: where in it the inputs begin, int64 [rows], of which ``has_row`` are read. data:
    bytes. lines: int64, all inside of the matrix.
    """
    ROWS: tl.constexpr = at.shape[0]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    lines = lines[:, None]
    for start in range(0, INNER, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        inputs = tl.load(x + at[:, None] + k, mask=has_row[:, None] & (k < INNER), other=0.0)
        byte = (start // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
        codes = tl.load(data + lines * (INNER // 2) + byte, mask=byte < INNER // 2, other=0)
        group = (start // 32 + tl.arange(0, BLOCK_K // 32))[None, :]
        scale = tl.load(scales + lines * (INNER // 32) + group, mask=group < INNER // 32, other=0)
        upper, lower, input_scales = two_parts(inputs, ROWS, BLOCK_K)
        acc = scaled_dot(codes, scale, upper, input_scales, acc)
        acc = scaled_dot(codes, scale, lower, input_scales, acc)
    return acc
