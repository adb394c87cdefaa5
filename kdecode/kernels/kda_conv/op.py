"""kda_conv: short causal depthwise convolution and SiLU over q, k, v; moves the cached window.

    y[t, c] = bf16(silu(sum_j w[j, c] raw[t - 3 + j, c]))        fp32 sums; raw: columns of kda_proj

The samples before a request's first row are its window in the cache, oldest first; the window is
left at the last three raw samples. The window of rows that are verified stays as it is.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="kda_conv",
    covers=("kda_conv",),
    reads=("kda_proj",),
    writes=("kda_qkv",),
    mutates=("conv",),
    tolerance=Tolerance(rtol=8e-3, atol=1e-4, rms_ratio=3e-3),
)
