"""MXFP4 weights in registers: codes and scales of "mxfp4_rows" to numbers, exactly.

Device functions. A word is four bytes of codes: 8 columns, the first in its lowest nibble. A code
is sign, two bits of exponent, one of mantissa; shifted to where fp32 or bf16 has those bits it is
the code's value times 2^-126 (0.5 becomes a subnormal number, which a product keeps). Knows no op.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.triton_ops import IS_INTERPRETED

# What turns the shifted bits of a code into its value.
CODE_FACTOR = tl.constexpr(2.0**126)
# `multiplied` takes inputs times the first; its sums times the second are the products.
INPUT_FACTOR = tl.constexpr(2.0**64)
SUM_FACTOR = tl.constexpr(2.0**62)


@triton.jit
def _code_pair(words, i: tl.constexpr):
    """Nibbles i and i + 4 of uint32 words, as two bf16 in one word, times 2^-126."""
    sign = words << (12 - 4 * i)
    size = words << (6 - 4 * i) if i < 2 else words >> (4 * i - 6)
    return (sign & 0x80008000) | (size & 0x01C001C0)


@triton.jit
def _in_fp32(pair):
    """The two bf16 of a word."""
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
    w0, w4 = _in_fp32(_code_pair(codes, 0))
    total = w0 * x0 + w4 * x4
    w1, w5 = _in_fp32(_code_pair(codes, 1))
    total = total + w1 * x1 + w5 * x5
    x2, x3 = input_pair(x23)
    x6, x7 = input_pair(x67)
    w2, w6 = _in_fp32(_code_pair(codes, 2))
    total = total + w2 * x2 + w6 * x6
    w3, w7 = _in_fp32(_code_pair(codes, 3))
    return total + w3 * x3 + w7 * x7


@triton.jit
def _times_bf16(pair, factor):
    """Products of the two bf16 of each word; exact ones, as a factor is a power of two."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [pair, factor],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scaled_pair(codes, i: tl.constexpr, scales):
    """Columns i and i + 4 of each word as bf16. scales uint32, broadcast."""
    pair = _code_pair(codes, i)
    if IS_INTERPRETED:
        low, high = _in_fp32(pair)
        scale = scale_value(scales)
        low = (low * CODE_FACTOR * scale).to(tl.bfloat16)
        return low, (high * CODE_FACTOR * scale).to(tl.bfloat16)
    else:
        # In bf16 too E8M0 is the exponent field.
        pair = _times_bf16(pair, tl.full(pair.shape, 0x7E807E80, tl.uint32))
        pair = _times_bf16(pair, (scales << 7) | (scales << 23))
        low = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return low, (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def dequantised(words, scales, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """int32 words [BLOCK_N, BLOCK_K / 8] and scales uint8 [BLOCK_N, BLOCK_K / 32] -> bf16
    [BLOCK_N, BLOCK_K]."""
    codes = words.to(tl.uint32, bitcast=True)
    # A group of columns is four words.
    codes = tl.reshape(codes, [BLOCK_N, BLOCK_K // 32, 4])
    scale = tl.broadcast_to(scales.to(tl.uint32)[:, :, None], [BLOCK_N, BLOCK_K // 32, 4])
    w0, w4 = _scaled_pair(codes, 0, scale)
    w1, w5 = _scaled_pair(codes, 1, scale)
    w2, w6 = _scaled_pair(codes, 2, scale)
    w3, w7 = _scaled_pair(codes, 3, scale)
    # The axes that are joined on are the bits of a nibble's number, the lowest one last.
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), [BLOCK_N, BLOCK_K])
