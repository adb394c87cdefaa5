"""One draft's tensors in canonical form: bf16, ``[out, in]``, as `model/parameters.py` has them.

Filled by `model/draft_weights.py`. Knows neither checkpoint names nor publishers. M is the model
width of draft and target, T the number of taps, R the Markov head's rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdecode.model.parameters import MlaParameters, MlpParameters


@dataclass(frozen=True)
class GqaParameters:
    q_proj: Tensor  # [H*K, M]
    k_proj: Tensor  # [Hkv*K, M]
    v_proj: Tensor  # [Hkv*K, M]
    o_proj: Tensor  # [M, H*K]
    q_norm: Tensor  # [K], for every head
    k_norm: Tensor  # [K]


@dataclass(frozen=True)
class DraftLayerParameters:
    input_norm: Tensor  # [M]
    post_norm: Tensor  # [M]
    attention: MlaParameters | GqaParameters
    mlp: MlpParameters


@dataclass(frozen=True)
class ConfidenceParameters:
    weight: Tensor  # [M + R]: of the hidden row, then of the Markov row
    bias: Tensor  # [1]


@dataclass(frozen=True)
class DraftParameters:
    """embed and lm_head: the draft's own, else None and the target's are used."""

    embed: Tensor | None  # [vocab, M]
    lm_head: Tensor | None  # [vocab, M]
    tap_norms: tuple[Tensor, ...] | None  # T of [M]
    context_proj: Tensor  # [M, T*M]
    context_norm: Tensor  # [M]
    layers: tuple[DraftLayerParameters, ...]
    norm: Tensor  # [M]
    markov_in: Tensor  # [vocab, R], a row for each previous token
    markov_out: Tensor  # [vocab, R]
    confidence: ConfidenceParameters | None
