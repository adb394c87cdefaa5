"""head: the last step of a plan.

    final_mix = MIX(prefix, snapshots)            residual mix; a copy of prefix without one
    head_in   = RMSNorm(final_mix; norm)          fp32 statistics and weight, rounded once
    logits    = bf16(head_in head^T)              kept as fp32

Phases: mix and norm (rows are split) | tiles of the head (split by bytes). Of several ranks each
has the logits of its part of the vocabulary, and behind an exchange every rank has all.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="head",
    covers=("final_mix", "head_norm", "head"),
    reads=("prefix", "snapshots"),
    writes=("final_mix", "head_in", "logits"),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
