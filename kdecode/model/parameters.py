"""One model's tensors in canonical form: shapes and dtypes of the checkpoint, ``[out, in]``.

Filled by `model/weights.py` (from memory-mapped shards) and read by the reference and by
`model/layout.py`. Knows neither checkpoint names nor packed layouts. Shapes use the letters of
ARCHITECTURE.md; D = H*K.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mxfp4:
    """A quantised [out, in]: codes U8 [out, in/2], low nibble first; scales U8 [out, in/32]."""

    packed: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2


ExpertWeight = Tensor | Mxfp4


@dataclass(frozen=True)
class KdaParameters:
    q_proj: Tensor  # [D, M] bf16, as k_proj and v_proj
    k_proj: Tensor
    v_proj: Tensor
    g_proj: Tensor | None  # [D, M], full-rank output gate
    g_a_proj: Tensor | None  # [G, M], low-rank output gate
    g_b_proj: Tensor | None  # [D, G]
    f_a_proj: Tensor  # [A, M]
    f_b_proj: Tensor  # [D, A]
    b_proj: Tensor  # [H, M]
    q_conv: Tensor  # [D, W] fp32; column W-1 multiplies the newest sample
    k_conv: Tensor
    v_conv: Tensor
    a_log: Tensor  # [H] fp32 (padding of the checkpoint already cut)
    dt_bias: Tensor  # [D] fp32
    o_norm: Tensor  # [V] fp32
    o_proj: Tensor  # [M, D]


@dataclass(frozen=True)
class MlaParameters:
    q_proj: Tensor | None  # [H*qk_dim, M] without q LoRA
    q_a_proj: Tensor | None  # [q_rank, M]
    q_a_norm: Tensor | None  # [q_rank]
    q_b_proj: Tensor | None  # [H*qk_dim, q_rank]
    kv_a_proj: Tensor  # [kv_rank + rope_dim, M]
    kv_a_norm: Tensor  # [kv_rank]
    # [H*(nope_dim + v_dim), kv_rank]; each head has nope_dim rows of W_UK, then v_dim of W_UV.
    kv_b_proj: Tensor
    g_proj: Tensor | None  # [H*v_dim, M]
    o_proj: Tensor  # [M, H*v_dim]
    # fp32 scalar for an fp8 cache, when the checkpoint has one.
    k_scale: Tensor | None


@dataclass(frozen=True)
class MlpParameters:
    """A gated MLP: dense layer or shared experts."""

    gate_proj: Tensor  # [width, M]
    up_proj: Tensor  # [width, M]
    down_proj: Tensor  # [M, width]


@dataclass(frozen=True)
class MoeParameters:
    router: Tensor  # [E, M] bf16
    router_bias: Tensor  # [E] fp32, selection only
    latent_down: Tensor | None  # [L, M]
    latent_norm: Tensor | None  # [L]
    latent_up: Tensor | None  # [M, L]
    shared: MlpParameters | None
    w1: tuple[ExpertWeight, ...]  # gate, E of [F, L or M]
    w3: tuple[ExpertWeight, ...]  # up
    w2: tuple[ExpertWeight, ...]  # down, E of [L or M, F]


@dataclass(frozen=True)
class MixParameters:
    """Attention residual mix: norm weight n [M] and score projection w [M]."""

    norm: Tensor
    proj: Tensor


@dataclass(frozen=True)
class LayerParameters:
    input_norm: Tensor  # [M]
    post_norm: Tensor  # [M]
    attn_mix: MixParameters | None
    mlp_mix: MixParameters | None
    attention: KdaParameters | MlaParameters
    mlp: MlpParameters | MoeParameters


@dataclass(frozen=True)
class ModelParameters:
    embed: Tensor  # [vocab, M]
    layers: tuple[LayerParameters, ...]
    final_mix: MixParameters | None
    norm: Tensor  # [M]
    lm_head: Tensor  # [vocab, M]
