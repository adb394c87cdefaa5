"""kda_out_norm: y = bf16(RMSNorm_V(o; o_norm) sigmoid(gate)), a head at a time; fp32, one rounding.

The gate is columns of kda_proj, full rank, or those times g_b (rounded).
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="kda_out_norm",
    covers=("kda_out_norm",),
    reads=("kda_out", "kda_proj"),
    writes=("attn_out",),
    mutates=(),
    tolerance=Tolerance(rtol=1e-2, atol=4e-3, rms_ratio=4e-3),
)
