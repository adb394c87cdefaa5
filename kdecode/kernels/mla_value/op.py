"""mla_value: the splits of the attention added up, then the gated values of every head.

    latent   = bf16(sum_s w_s sums_s / sum_s w_s l_s)     w_s = 2^(m_s - max m), in order of splits
    attn_out = bf16((W_UV latent) sigmoid(gate))          without a gate: bf16(W_UV latent)

Splits are those of `mla_attend`. A row without a context (row_position -1) has a latent of zeros.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="mla_value",
    covers=("mla_attend", "mla_value"),
    reads=("mla_split_sums", "mla_split_stats", "mla_proj", "row_position"),
    writes=("mla_latent", "attn_out"),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
