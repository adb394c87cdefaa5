"""moe_gate: the products of a mixture of experts that read the normed input, and its choice.

    s = sigmoid(router mlp_in)                                          fp32
    route_ids      = top N of s + bias            best first; the lowest expert first on ties
    route_weights  = s[ids] / (sum s[ids] + 1e-20) * scaling            the bias only selects
    latent         = bf16(latent_down mlp_in)                           LatentMoE only
    shared_product = bf16(act(bf16(gate mlp_in), bf16(up mlp_in)))      shared experts

`shared_product` is the first half of the stage shared_mlp, done here because it reads the same
input: a mixture's shared experts cost no launch of their own. `moe_join` does the other half and is
the step that covers the stage. A row of NaN gets the experts 0 .. N-1 with NaN weights.

On one of several ranks the products are this rank's parts of two values, `router_part` and
`latent_part`, and of the shared experts'. Where the ranks signal each other from inside of their
kernels it also makes both values whole, which are the stages' ends; else `rank_whole` does.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="moe_gate",
    covers=("route", "latent_down"),
    reads=("mlp_in",),
    writes=("route_ids", "route_weights", "latent", "shared_product"),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
