"""Small models and inputs that tests share: configurations, seeded parameters, decay ranges.

The parameters are canonical tensors made in memory, for tests of the maths. Tests of loading use
checkpoint directories made by `model/synthesis.py` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.config import (
    Activation,
    KdaConfig,
    LayerKind,
    MlaConfig,
    MlpKind,
    ModelConfig,
    MoeConfig,
)
from kdecode.model.parameters import (
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
)

# Layer kinds repeat like the released models: three KDA layers, one MLA layer; the last is MLA.
_PERIOD = 4


def tiny_k3(num_layers: int = 5, attn_res_block: int = 2) -> ModelConfig:
    """The K3 form of everything: SiTU, lower-bound gate, q LoRA, output gates, latent experts."""
    return ModelConfig(
        model_type="kimi_k3",
        hidden_size=64,
        vocab_size=96,
        layer_kinds=_kinds(num_layers),
        mlp_kinds=_mlp_kinds(num_layers),
        dense_width=96,
        activation=Activation("situ", beta=4.0, linear_beta=25.0),
        rms_eps=1e-5,
        attn_res_block=attn_res_block,
        kda=KdaConfig(2, 16, 4, gate_lower_bound=-5.0, is_gate_full_rank=True),
        mla=MlaConfig(2, 24, 32, 16, 8, 16, has_output_gate=True, latent_norm_eps=1e-5),
        moe=MoeConfig(8, 3, 32, 2, 32, True, True, 1.0, "bf16"),
        max_positions=1024,
        bos_id=0,
        eos_id=1,
        pad_id=2,
    )


def tiny_linear(num_layers: int = 4) -> ModelConfig:
    """The Kimi-Linear form: SiLU, softplus gate of low rank, plain query, plain residual."""
    return ModelConfig(
        model_type="kimi_linear",
        hidden_size=64,
        vocab_size=96,
        layer_kinds=_kinds(num_layers),
        mlp_kinds=_mlp_kinds(num_layers),
        dense_width=96,
        activation=Activation("silu"),
        rms_eps=1e-5,
        attn_res_block=None,
        kda=KdaConfig(2, 16, 4, gate_lower_bound=None, is_gate_full_rank=False),
        mla=MlaConfig(2, None, 32, 16, 8, 16, has_output_gate=False, latent_norm_eps=1e-5),
        moe=MoeConfig(8, 3, 32, 1, None, False, True, 2.446, "bf16"),
        max_positions=1024,
        bos_id=0,
        eos_id=1,
        pad_id=2,
    )


def _kinds(num_layers: int) -> tuple[LayerKind, ...]:
    last = num_layers - 1
    return tuple(
        "mla" if layer % _PERIOD == _PERIOD - 1 or layer == last else "kda"
        for layer in range(num_layers)
    )


def _mlp_kinds(num_layers: int) -> tuple[MlpKind, ...]:
    return tuple("moe" if layer else "dense" for layer in range(num_layers))


def random_parameters(config: ModelConfig, seed: int = 0) -> ModelParameters:
    """Seeded parameters of ``config``, in the dtypes of the checkpoint; experts in bf16."""
    draw = _Draw(torch.Generator().manual_seed(seed))
    width = config.hidden_size
    layers = []
    for layer, kind in enumerate(config.layer_kinds):
        attention = _kda(config, draw) if kind == "kda" else _mla(config, draw)
        is_dense = config.mlp_kinds[layer] == "dense"
        mlp = draw.mlp(width, config.dense_width) if is_dense else _moe(config, draw)
        layers.append(
            LayerParameters(
                draw.norm(width),
                draw.norm(width),
                _mix(config, draw),
                _mix(config, draw),
                attention,
                mlp,
            )
        )
    return ModelParameters(
        embed=draw.normal(config.vocab_size, width, std=1.0),
        layers=tuple(layers),
        final_mix=_mix(config, draw),
        norm=draw.norm(width),
        lm_head=draw.matrix(config.vocab_size, width),
    )


@dataclass(frozen=True)
class _Draw:
    generator: torch.Generator

    def normal(self, *shape: int, std: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * std).to(dtype)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def matrix(self, rows: int, cols: int) -> Tensor:
        return self.normal(rows, cols, std=cols**-0.5)

    def norm(self, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.uniform(width, low=0.5, high=1.5).to(dtype)

    def mlp(self, outer: int, inner: int) -> MlpParameters:
        return MlpParameters(
            self.matrix(inner, outer), self.matrix(inner, outer), self.matrix(outer, inner)
        )


def _mix(config: ModelConfig, draw: _Draw) -> MixParameters | None:
    if config.attn_res_block is None:
        return None
    width = config.hidden_size
    return MixParameters(draw.norm(width), draw.normal(width, std=2.0 * width**-0.5))


def decay_parameters(
    num_heads: int, head_dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """a_log [H] and dt_bias [D] in the range that trained checkpoints have: A from 1 to 16."""
    draw = _Draw(generator)
    a_log = draw.uniform(num_heads, low=1.0, high=16.0).log()
    dt = draw.uniform(num_heads * head_dim, low=math.log(1e-3), high=math.log(1e-1)).exp()
    return a_log, dt + torch.log(-torch.expm1(-dt))


def _kda(config: ModelConfig, draw: _Draw) -> KdaParameters:
    kda, width = config.kda, config.hidden_size
    full = kda.is_gate_full_rank
    a_log, dt_bias = decay_parameters(kda.num_heads, kda.head_dim, draw.generator)
    convs = [draw.normal(kda.width, kda.conv_width, std=0.5, dtype=torch.float32) for _ in range(3)]
    return KdaParameters(
        q_proj=draw.matrix(kda.width, width),
        k_proj=draw.matrix(kda.width, width),
        v_proj=draw.matrix(kda.width, width),
        g_proj=draw.matrix(kda.width, width) if full else None,
        g_a_proj=None if full else draw.matrix(kda.head_dim, width),
        g_b_proj=None if full else draw.matrix(kda.width, kda.head_dim),
        f_a_proj=draw.matrix(kda.head_dim, width),
        f_b_proj=draw.matrix(kda.width, kda.head_dim),
        b_proj=draw.matrix(kda.num_heads, width),
        q_conv=convs[0],
        k_conv=convs[1],
        v_conv=convs[2],
        a_log=a_log,
        dt_bias=dt_bias,
        o_norm=draw.norm(kda.head_dim, torch.float32),
        o_proj=draw.matrix(width, kda.width),
    )


def _mla(config: ModelConfig, draw: _Draw) -> MlaParameters:
    mla, width = config.mla, config.hidden_size
    query_rows = mla.num_heads * mla.qk_dim
    value_rows = mla.num_heads * mla.v_dim
    rank = mla.q_rank
    return MlaParameters(
        q_proj=draw.matrix(query_rows, width) if rank is None else None,
        q_a_proj=None if rank is None else draw.matrix(rank, width),
        q_a_norm=None if rank is None else draw.norm(rank),
        q_b_proj=None if rank is None else draw.matrix(query_rows, rank),
        kv_a_proj=draw.matrix(mla.cache_width, width),
        kv_a_norm=draw.norm(mla.kv_rank),
        kv_b_proj=draw.matrix(mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_rank),
        g_proj=draw.matrix(value_rows, width) if mla.has_output_gate else None,
        o_proj=draw.matrix(width, value_rows),
        k_scale=None,
    )


def _moe(config: ModelConfig, draw: _Draw) -> MoeParameters:
    moe, width = config.moe, config.hidden_size
    latent = moe.latent_width
    inner = width if latent is None else latent
    mlps = [draw.mlp(inner, moe.expert_width) for _ in range(moe.num_experts)]
    return MoeParameters(
        router=draw.matrix(moe.num_experts, width),
        router_bias=draw.normal(moe.num_experts, std=0.1, dtype=torch.float32),
        latent_down=None if latent is None else draw.matrix(latent, width),
        latent_norm=draw.norm(latent) if latent is not None and moe.has_latent_norm else None,
        latent_up=None if latent is None else draw.matrix(width, latent),
        shared=draw.mlp(width, moe.shared_width) if moe.num_shared else None,
        w1=tuple(mlp.gate_proj for mlp in mlps),
        w3=tuple(mlp.up_proj for mlp in mlps),
        w2=tuple(mlp.down_proj for mlp in mlps),
    )
