"""experts: the weighted sum of each row's experts.

    e_k = bf16(down_e bf16(act(bf16(gate_e x), bf16(up_e x))))
    y   = bf16(sum_k w_k e_k)                                                 fp32 sum

x: ``latent``, or ``mlp_in`` for experts at the model width. Each expert is read once a step, for
all rows that chose it; no dequantised copy outlives its use.

Of several ranks each has some columns of every expert and of the shared ones, and some rows of the
way up from the latents. The sums of both kinds travel together, so that the step also covers what
follows: the sums are exchanged, then the columns of ``routed`` (`latent_up`, `shared_mlp`).
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="experts",
    covers=("experts",),
    reads=("latent", "mlp_in", "route_ids", "route_weights"),
    writes=("expert_sum",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=1e-2, rms_ratio=8e-3),
)
