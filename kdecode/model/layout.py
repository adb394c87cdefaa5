"""Packed weights: the one store that both backends of an engine read.

Owns the order in which projections of one input are joined into one matrix, and the way back to the
canonical parameters. Does not know checkpoint names (`weights.py`) or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.matrix import Matrix


@dataclass(frozen=True)
class PackedKda:
    in_proj: Matrix  # [3D + G + A + H, M]: q, k, v, g (or g_a), f_a, b
    f_b: Matrix  # [D, A]
    g_b: Matrix | None  # [D, G] with a low-rank gate
    conv: Tensor  # [W, 3D] fp32, tap-major, newest tap last; channels q, k, v
    decay_scale: Tensor  # [H] fp32, exp(A_log)
    dt_bias: Tensor  # [D] fp32
    o_norm: Tensor  # [V] fp32
    o_proj: Matrix  # [M, D]


@dataclass(frozen=True)
class PackedMla:
    in_proj: Matrix  # [q_rank or H*qk_dim, + kv_rank + rope_dim, + H*v_dim with a gate; M]
    q_norm: Tensor | None  # [q_rank] fp32
    q_b: Matrix | None  # [H*qk_dim, q_rank]
    kv_norm: Tensor  # [kv_rank] fp32
    w_uk: Matrix  # [H*kv_rank, nope_dim]: head h's W_UK transposed, so that q_latent = w_uk[h] q_nope
    w_uv: Matrix  # [H*v_dim, kv_rank]
    o_proj: Matrix  # [M, H*v_dim]
    cache_scale: Tensor | None  # fp32 scalar of an fp8 cache


@dataclass(frozen=True)
class PackedMlp:
    # [2*width, M]. "rows": gate rows, then up rows. "tiles": 16 gate rows, 16 up rows, alternating, so that one thread has
    # both halves of a product; width is a multiple of 16 there.
    gate_up: Matrix
    down: Matrix  # [M, width]


@dataclass(frozen=True)
class PackedMoe:
    router: Matrix  # [E, M]
    router_bias: Tensor  # [E] fp32
    latent_down: Matrix | None  # [L, M]
    latent_norm: Tensor | None  # [L] fp32
    latent_up: Matrix | None  # [M, L]
    shared: PackedMlp | None
    experts: tuple[PackedMlp, ...]  # E; width F, model side L or M


@dataclass(frozen=True)
class PackedLayer:
    input_norm: Tensor  # [M] fp32
    post_norm: Tensor  # [M] fp32
    attn_mix: Tensor | None  # [M] fp32, norm weight times score projection
    mlp_mix: Tensor | None
    attention: PackedKda | PackedMla
    mlp: PackedMlp | PackedMoe


@dataclass(frozen=True)
class PackedModel:
    config: ModelConfig
    embed: Tensor  # [vocab, M] bf16, row-major
    layers: tuple[PackedLayer, ...]
    final_mix: Tensor | None  # [M] fp32
    norm: Tensor  # [M] fp32
    head: Matrix  # [vocab, M]
