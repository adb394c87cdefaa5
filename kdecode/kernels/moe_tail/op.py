"""moe_tail: the routed experts, the end of the shared experts, and the residual add.

    product    = bf16(act(bf16(gate_e x), bf16(up_e x)))      x: latent, or mlp_in without latents
    e_k        = bf16(down_e product)                         e: the expert in slot k
    expert_sum = bf16(sum_k route_weights[k] e_k)             fp32, in the order of the slots
    routed     = bf16(latent_up RMSNorm(expert_sum; latent_norm))       expert_sum without latents
    shared     = bf16(shared_down shared_product)             the product is moe_front's
    mlp_delta  = bf16(routed + shared);  prefix = bf16(prefix + mlp_delta)

A step of several rows reads each distinct expert once, for all rows that chose it. An id outside
[0, E) reads nothing and makes its row NaN.

Phases: gate and up of the distinct experts, then tiles of shared_down | down of the distinct
experts | weighted sums (split by columns) | norm (rows are split) | tiles of latent_up with the
residual add.

Of several ranks, each of which has a part of every expert's width and of the shared experts', no
rank has e_k or shared whole, so that neither is rounded by itself: expert_sum is bf16 of the sum
over ranks of sum_k route_weights[k] part_k, shared bf16 of the sum over ranks. Both are exchanged
at once, behind the weighted sums; tiles of latent_up, of which a rank has its rows, are exchanged
before the residual add.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="moe_tail",
    covers=("experts", "latent_up", "shared_mlp", "mlp_residual"),
    reads=("mlp_in", "latent", "route_ids", "route_weights", "shared_product", "prefix"),
    writes=("expert_sum", "routed", "shared", "mlp_delta", "prefix"),
    mutates=("prefix",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
