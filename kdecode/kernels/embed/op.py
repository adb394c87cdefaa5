"""embed: the first step of a plan.

    prefix[r] = table[row_token[r]]                                     bf16, a copy

Of several ranks each has a part of the vocabulary: the one that has a token's row copies it to
where all others read it.

A row whose token id is outside the vocabulary becomes NaN in every column: nothing is read out of
bounds and no other token's embedding is taken for it. The engine checks ids before a step and
raises; NaN logits are what a missing check would show.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="embed",
    covers=("embed",),
    reads=("row_token",),
    writes=("prefix",),
    mutates=(),
    tolerance=Tolerance(rtol=0.0, atol=0.0, rms_ratio=0.0),
)
