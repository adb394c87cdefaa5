"""dense_join: the end of a layer without experts.

mlp_delta = bf16(down dense_product)                 the product is dense_up's
prefix    = bf16(prefix + mlp_delta)
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="dense_join",
    covers=("dense_mlp", "mlp_residual"),
    reads=("dense_product", "prefix"),
    writes=("mlp_delta", "prefix"),
    mutates=("prefix",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
