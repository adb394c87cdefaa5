"""moe_join: the end of a mixture of experts.

    routed    = bf16(latent_up RMSNorm(expert_sum; latent_norm))       expert_sum without latents
    shared    = bf16(shared_down shared_product)                       the product is moe_gate's
    mlp_delta = bf16(routed + shared);  prefix = bf16(prefix + mlp_delta)

Without shared experts mlp_delta is routed. Of more than two rows the norm takes its squares from
`expert_squares`, which expert_down has made of the same sums. Of a plan that has its shared experts
beside it (`SharedMade`), `shared` is there already and is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class SharedMade:
    """layer: a `PackedLayer` whose shared experts other steps have run."""

    layer: Any


CONTRACT = OpContract(
    name="moe_join",
    covers=("latent_up", "shared_mlp", "mlp_residual"),
    reads=("expert_sum", "expert_squares", "shared_product", "prefix"),
    writes=("routed", "shared", "mlp_delta", "prefix"),
    mutates=("prefix",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
# Of `SharedMade`.
MADE_CONTRACT = replace(
    CONTRACT,
    reads=("expert_sum", "expert_squares", "shared", "prefix"),
    writes=("routed", "mlp_delta", "prefix"),
)
