"""embed_norm: the first step of a CUDA plan, up to what the first layer's attention reads.

    prefix[r] = table[row_token[r]]                                     bf16, a copy
    attn_mix  = prefix                                                  no snapshot exists yet
    attn_in   = RMSNorm(attn_mix; input_norm)      fp32 statistics and weight, rounded once

A row whose token id is outside the vocabulary becomes NaN in every column, as in embed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class EmbedWeights:
    """table [vocab, M] bf16; then: the mix and norm before the first layer's attention."""

    table: Tensor
    then: MixNorm


CONTRACT = OpContract(
    name="embed_norm",
    covers=("embed", "attn_mix", "attn_norm"),
    reads=("row_token",),
    writes=("prefix", "attn_mix", "attn_in"),
    mutates=(),
    tolerance=Tolerance(rtol=8e-3, atol=1e-4, rms_ratio=3e-3),
)
