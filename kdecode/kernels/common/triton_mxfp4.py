"""MXFP4 weights in registers: codes and scales of "mxfp4_rows" to numbers, exactly.

Device functions. A word is four bytes of codes: 8 columns, the first in its lowest nibble. A code
is sign, two bits of exponent, one of mantissa; shifted to where fp32 or bf16 has those bits it is
the code's value times 2^-126 (0.5 becomes a subnormal number, which a product keeps). Knows no op.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What turns the shifted bits of a code into its value.
CODE_FACTOR = tl.constexpr(2.0**126)
# `multiplied` takes inputs times the first; its sums times the second are the products.
INPUT_FACTOR = tl.constexpr(2.0**64)
SUM_FACTOR = tl.constexpr(2.0**62)


@triton.jit
def _code_pair(words, i: tl.constexpr):
    """Nibbles i and i + 4 of uint32 words, as fp32 times 2^-126."""
    sign = words << (12 - 4 * i)
    size = words << (6 - 4 * i) if i < 2 else words >> (4 * i - 6)
    pair = (sign & 0x80008000) | (size & 0x01C001C0)
    low = (pair << 16).to(tl.float32, bitcast=True)
    return low, (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(scales):
    """E8M0 bytes as fp32: they are its exponent field."""
    return (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def input_pair(words):
    """Two neighbouring bf16 inputs of each 32-bit word, in fp32, times `INPUT_FACTOR`."""
    bits = words.to(tl.uint32, bitcast=True)
    even = (bits << 16).to(tl.float32, bitcast=True) * INPUT_FACTOR
    return even, (bits & 0xFFFF0000).to(tl.float32, bitcast=True) * INPUT_FACTOR


@triton.jit
def multiplied(words, x01, x23, x45, x67):
    """The sum over the 8 columns of each int32 word, without its scale, over `SUM_FACTOR`.

    x01 ...: int32 words of two bf16 inputs, of shapes that broadcast to that of ``words``.
    """
    codes = words.to(tl.uint32, bitcast=True)
    # A pair of codes at a time, so that few numbers are alive at once.
    x0, x1 = input_pair(x01)
    x4, x5 = input_pair(x45)
    w0, w4 = _code_pair(codes, 0)
    total = w0 * x0 + w4 * x4
    w1, w5 = _code_pair(codes, 1)
    total = total + w1 * x1 + w5 * x5
    x2, x3 = input_pair(x23)
    x6, x7 = input_pair(x67)
    w2, w6 = _code_pair(codes, 2)
    total = total + w2 * x2 + w6 * x6
    w3, w7 = _code_pair(codes, 3)
    return total + w3 * x3 + w7 * x7


@triton.jit
def dequantised(words, scales, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """int32 words [BLOCK_N, BLOCK_K / 8] and scales uint8 [BLOCK_N, BLOCK_K / 32] -> bf16
    [BLOCK_N, BLOCK_K]."""
    codes = words.to(tl.uint32, bitcast=True)
    w0, w4 = _code_pair(codes, 0)
    w1, w5 = _code_pair(codes, 1)
    w2, w6 = _code_pair(codes, 2)
    w3, w7 = _code_pair(codes, 3)
    # The axes that are joined on are the bits of a nibble's number, the lowest one last.
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    values = tl.reshape(tl.join(even, odd), [BLOCK_N, BLOCK_K // 32, 32])
    scaled = values * CODE_FACTOR * scale_value(scales)[:, :, None]
    return tl.reshape(scaled.to(tl.bfloat16), [BLOCK_N, BLOCK_K])
