"""mix_norm: the residual mix and the RMSNorm that a block begins with.

    mix  = MIX(prefix, snapshots)            as in attn_res; a copy of prefix without one
    norm = RMSNorm(mix; weight)              fp32 statistics and weight, rounded once

Before attention, before an MLP or before the head: the weights (`common/mix_norm.py: MixNorm`) name
the two buffers, and `contract_at` has the contract of each place.
"""

from __future__ import annotations

from kdecode.kernels.common.mix_norm import OUTPUTS, STAGES, Place
from kdecode.kernels.contract import OpContract, Tolerance


def contract_at(place: Place) -> OpContract:
    return OpContract(
        name="mix_norm",
        covers=STAGES[place],
        reads=("prefix", "snapshots"),
        writes=OUTPUTS[place],
        mutates=(),
        tolerance=Tolerance(rtol=1e-2, atol=4e-3, rms_ratio=5e-3),
    )


CONTRACT = contract_at("attn")
