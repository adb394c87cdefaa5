"""expert_up: the activated product of each row's experts.

    expert_product[r, k] = bf16(act(bf16(gate_e x_r), bf16(up_e x_r)))      e: route_ids[r, k]

x: ``latent``, or ``mlp_in`` for experts at the model width. `expert_product` is [R, N, F] bf16. It
is the first half of the stage experts, which `expert_down` covers. In a step of many rows each
distinct expert is read once, for all rows that chose it. An id outside [0, E) reads nothing, and
its product is left as it was: `expert_down` does not look at it.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="expert_up",
    covers=(),
    reads=("latent", "mlp_in", "route_ids"),
    writes=("expert_product",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
