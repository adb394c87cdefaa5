"""draft_choice: the logits of one draft of each request of a block, and the first choice of each.

    draft_logits[b] = logits[b N + place] + markov_out markov_in[draft_tokens[place, b]]
    draft_tokens[place + 1, b] = the first of the largest of draft_logits[b]

fp32, not rounded; N rows of a request, `Problem.rows_per_request`. draft_tokens[0] are the anchors.
A logit that is NaN is no choice, so that the next token is one of the vocabulary whatever the
logits are. Covers no stage of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class ChoiceWeights:
    """markov_in bf16 [vocab, R]; markov_out [vocab, R]. place: of the draft in the block."""

    markov_in: Tensor
    markov_out: Matrix
    place: int


CONTRACT = OpContract(
    name="draft_choice",
    covers=(),
    reads=("logits", "draft_tokens"),
    writes=("draft_logits", "draft_tokens"),
    mutates=(),
    tolerance=Tolerance(rtol=1e-4, atol=1e-4, rms_ratio=1e-5),
)
