"""moe_front: everything in a mixture of experts that reads the normed input.

    mlp_mix = MIX(prefix, snapshots)              residual mix; a copy of prefix without one
    mlp_in  = RMSNorm(mlp_mix; post_norm)         fp32 statistics and weight, rounded once
    s       = sigmoid(router mlp_in)              fp32
    route_ids     = top N of s + bias             best first; the lowest expert first on ties
    route_weights = s[ids] / (sum s[ids] + 1e-20) * scaling             the bias only selects
    latent  = bf16(latent_down mlp_in)            LatentMoE only
    shared_product = bf16(act(bf16(gate mlp_in), bf16(up mlp_in)))      shared experts

`shared_product` is the first half of the stage shared_mlp, done here because it reads the same
input; moe_tail finishes that stage and is the step that covers it. A row of NaN gets the experts
0 .. N-1 with NaN weights.

Phases: mix and norm (rows are split) | pairs of shared tiles, latent tiles, router tiles (split by
bytes) | selection (rows are split). Of several ranks, each of which has rows of the router and of
latent_down: latent tiles, router tiles | one exchange of both, while it is under way the pairs of
shared tiles | rows of all ranks side by side, and selection, on every rank.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="moe_front",
    covers=("mlp_mix", "mlp_norm", "route", "latent_down"),
    reads=("prefix", "snapshots"),
    writes=("mlp_mix", "mlp_in", "route_ids", "route_weights", "latent", "shared_product"),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
