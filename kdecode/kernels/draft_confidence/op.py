"""draft_confidence: how likely each draft of a block holds if all before it do.

    draft_confidence[b N + k] = sigmoid(w [head_in[b N + k]; markov_in[draft_tokens[k, b]]] + bias)

fp32; N rows of a request, `Problem.rows_per_request`. It sees the token in front of a draft and not
the draft. Covers no stage of the target.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="draft_confidence",
    covers=(),
    reads=("head_in", "draft_tokens"),
    writes=("draft_confidence",),
    mutates=(),
    tolerance=Tolerance(rtol=1e-4, atol=1e-5, rms_ratio=1e-5),
)
