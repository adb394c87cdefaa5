"""dense_mlp: the MLP half of a layer without experts.

    mlp_mix   = MIX(prefix, snapshots)            residual mix; a copy of prefix without one
    mlp_in    = RMSNorm(mlp_mix; post_norm)       fp32 statistics and weight, rounded once
    product   = bf16(act(bf16(gate mlp_in), bf16(up mlp_in)))
    mlp_delta = bf16(down product)
    prefix    = bf16(prefix + mlp_delta)

act is SiLU(g) u or SiTU, in fp32.

Phases: mix and norm (rows are split) | pairs of gate and up tiles | tiles of down, each with its
columns of the residual add. Of several ranks, each of which has a part of the width, the tiles of
down are unrounded, and behind an exchange their sums are rounded once and added to the residual.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="dense_mlp",
    covers=("mlp_mix", "mlp_norm", "dense_mlp", "mlp_residual"),
    reads=("prefix", "snapshots"),
    writes=("mlp_mix", "mlp_in", "mlp_delta", "prefix"),
    mutates=("prefix",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
