"""MXFP4: E2M1 codes, one E8M0 scale for 32 consecutive input columns.

Owns packing, unpacking and dequantising of canonical weights (codes U8 [out, in/2], the low nibble
is the even column; scales U8 [out, in/32], value 2^(s - 127)). Dequantising is exact: a code has
two significant bits. Rounds in one place, `pack`: to the nearest code, ties to the even one. Does
not know tile layouts (`kernels/common/matrix.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP
from kdecode.kernels.common.matrix import E2M1_MAGNITUDES
from kdecode.model.parameters import Mxfp4

SCALE_BIAS = 127
# Scale bytes that no weight file may have: 0 decodes differently in different engines, 255 is NaN.
INVALID_SCALES = (0, 255)
# Scales that `pack` makes: with the largest one, the code 6 is still a finite bf16 number.
MIN_SCALE, MAX_SCALE = 1, 252

# Midpoints between neighbouring magnitudes; a tie goes to the even code, so every second midpoint
# belongs to the code above it.
_ROUND_UP_ABOVE = (0.25, 1.25, 2.5, 5.0)
_ROUND_UP_FROM = (0.75, 1.75, 3.5)


def code_values() -> Tensor:
    """The 16 values of a code, fp32: code c + 8 is minus code c."""
    positive = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32)
    return torch.cat([positive, -positive])


def pack(weight: Tensor) -> Mxfp4:
    """Nearest MXFP4 weight of ``weight`` [out, in], with the smallest scales that clip nothing.

    Raises ValueError for numbers that are not finite and for scales outside [1, 252].
    """
    rows, cols = weight.shape
    if cols % MXFP4_GROUP:
        raise ValueError(f"MXFP4 needs a multiple of {MXFP4_GROUP} columns; there are {cols}.")
    groups = weight.to(torch.float64).view(rows, cols // MXFP4_GROUP, MXFP4_GROUP)
    largest = groups.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise ValueError("MXFP4 cannot hold NaN or infinity; the weight has some.")
    # largest = m * 2^e with m in [0.5, 1); the largest code is 6 = 0.75 * 2^3.
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 3 + (mantissa > 0.75)
    scale = torch.where(largest > 0, exponent + SCALE_BIAS, SCALE_BIAS)
    low, high = int(scale.min()), int(scale.max())
    if low < MIN_SCALE or high > MAX_SCALE:
        raise ValueError(
            f"The weight needs MXFP4 scale bytes from {low} to {high}; the format has "
            f"{MIN_SCALE} to {MAX_SCALE}."
        )
    scaled = torch.ldexp(groups, (SCALE_BIAS - scale).unsqueeze(-1)).abs()
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for bound in _ROUND_UP_ABOVE:
        codes += scaled > bound
    for bound in _ROUND_UP_FROM:
        codes += scaled >= bound
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    return Mxfp4(pack_codes(codes.view(rows, cols)), scale.to(torch.uint8))


def pack_codes(codes: Tensor) -> Tensor:
    """Codes U8 [out, in] in 0..15 -> bytes U8 [out, in/2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Bytes U8 [out, in/2] -> codes U8 [out, in]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1)


def dequantise(weight: Mxfp4) -> Tensor:
    """The weight [out, in] in bf16, exactly."""
    rows, cols = weight.shape
    values = code_values()[unpack_codes(weight.packed).int()]
    # E8M0 is the exponent field of an fp32 number.
    scales = (weight.scale.int() << 23).view(torch.float32)
    product = values.view(rows, cols // MXFP4_GROUP, MXFP4_GROUP) * scales.unsqueeze(-1)
    return product.view(rows, cols).to(torch.bfloat16)
