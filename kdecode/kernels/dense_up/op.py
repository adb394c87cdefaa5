"""dense_up: gate and up projection of a layer without experts.

    dense_product = bf16(act(bf16(gate mlp_in), bf16(up mlp_in)))

act is SiLU(g) u or SiTU, in fp32. The stage dense_mlp ends in dense_join.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="dense_up",
    covers=(),
    reads=("mlp_in",),
    writes=("dense_product",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=1e-2, rms_ratio=8e-3),
)
