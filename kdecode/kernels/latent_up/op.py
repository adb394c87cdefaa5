"""latent_up: routed = bf16(up RMSNorm(expert_sum; norm)); the norm is on the summed experts."""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="latent_up",
    covers=("latent_up",),
    reads=("expert_sum",),
    writes=("routed",),
    mutates=(),
    tolerance=Tolerance(rtol=1e-2, atol=1e-2, rms_ratio=6e-3),
)
