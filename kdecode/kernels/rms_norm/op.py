"""rms_norm: y = bf16(x rsqrt(mean(x^2) + eps) w) over the last axis; fp32, rounded once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class NormWeights:
    """weight [M] fp32; the buffers to read and to write."""

    weight: Tensor
    input: str
    output: str


CONTRACT = OpContract(
    name="rms_norm",
    covers=("attn_norm",),
    reads=("attn_mix",),
    writes=("attn_in",),
    mutates=(),
    tolerance=Tolerance(rtol=8e-3, atol=1e-4, rms_ratio=3e-3),
)
