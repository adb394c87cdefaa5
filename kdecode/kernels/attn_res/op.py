"""attn_res: the attention residual mix of a block's input.

    s_i = <x_i, w> rsqrt(mean(x_i^2) + eps)       x_0 .. x_{m-1}: snapshots, x_m: prefix; fp32
    out = bf16(sum_i softmax(s)_i x_i)            the raw x_i, not normalised

w [M] fp32 is the norm weight times the score projection. Without snapshots, or in a model without
attention residuals, the mix is the prefix itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class MixWeights:
    """weight: None for a model without attention residuals. output: the buffer to write."""

    weight: Tensor | None
    num_snapshots: int
    output: str


CONTRACT = OpContract(
    name="attn_res",
    covers=("attn_mix",),
    reads=("prefix", "snapshots"),
    writes=("attn_mix",),
    mutates=(),
    tolerance=Tolerance(rtol=1e-2, atol=2e-3, rms_ratio=4e-3),
)
