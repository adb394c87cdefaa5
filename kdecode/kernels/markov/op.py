"""markov: what the token before adds to a draft's logits.

    bias[r] = markov_out markov_in[row_previous[r]]         fp32 [vocab], not rounded

One phase: tiles of markov_out. Covers no stage of the target.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="markov",
    covers=(),
    reads=("row_previous",),
    writes=("markov_bias",),
    mutates=(),
    tolerance=Tolerance(rtol=1e-4, atol=1e-4, rms_ratio=1e-5),
)
