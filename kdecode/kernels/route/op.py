"""route: the experts of each row and their weights, fp32.

    s = sigmoid(x W^T);  ids = top N of s + bias;  w = s[ids] / (sum s[ids] + 1e-20) scaling

The bias only selects. Of equal biased scores the lowest expert is first.

Of several ranks each has some rows of the router, and of the way to the latents. The logits of all
travel with the latents, so that the step also covers `latent_down`.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="route",
    covers=("route",),
    reads=("mlp_in",),
    writes=("route_ids", "route_weights"),
    mutates=(),
    tolerance=Tolerance(rtol=1e-4, atol=1e-6, rms_ratio=1e-4),
)
