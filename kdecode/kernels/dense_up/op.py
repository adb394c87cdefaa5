"""dense_up: gate and up projection of a layer without experts, or of the shared ones of a mixture.

    dense_product = bf16(act(bf16(gate mlp_in), bf16(up mlp_in)))

act is SiLU(g) u or SiTU, in fp32. The stage dense_mlp ends in dense_join; `shared_product`, which a
plan with its shared experts beside it has in place of dense_product, in moe_join.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class UpWeights:
    """gate_up: gate rows, then up rows. output: the buffer of the product."""

    gate_up: Matrix
    output: str = "dense_product"


CONTRACT = OpContract(
    name="dense_up",
    covers=(),
    reads=("mlp_in",),
    writes=("dense_product",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=1e-2, rms_ratio=8e-3),
)
