"""The short convolution of one request on the native CPU kernels, in torch's OpenMP threads."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import ptr


def takes(num_taps: int) -> bool:
    """Whether the kernels have a convolution of so many taps."""
    return num_taps == int(_native.CONV_TAPS)


def convolve(raw: Tensor, window: Tensor, taps: Tensor, isa: str | None = None) -> Tensor:
    """SiLU of the convolution [T, C] bf16; ``window`` [3, C] bf16 is moved past the rows.

    raw [T, C] bf16: columns of a row-major buffer. taps [4, C] fp32, newest last. isa: instruction
    set; None is the best.
    """
    tokens, channels = raw.shape
    if raw.dtype != torch.bfloat16 or raw.stride(1) != 1:
        raise ValueError(
            f"A convolution takes neighbouring bf16 columns; these are {raw.dtype} with strides "
            f"{list(raw.stride())}."
        )
    out = torch.empty(tokens, channels, dtype=torch.bfloat16)
    _native.convolve(
        isa or _native.detect_isa(),
        raw.data_ptr(),
        raw.stride(0),
        ptr(window, torch.bfloat16, (taps.shape[0] - 1, channels)),
        ptr(taps, torch.float32, (taps.shape[0], channels)),
        out.data_ptr(),
        tokens,
        channels,
    )
    return out
