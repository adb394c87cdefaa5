"""What a GGUF file of a checkpoint has: settings, tensors and vocabulary by llama.cpp's names.

Owns the mapping from canonical parameters (`model/parameters.py`) to llama.cpp's ``kimi-linear``
and ``kimi-k3`` graphs: names, shapes, what is folded (``-exp(A_log)``, a residual mix's norm times
its projection), what is split (kv_b, per head) and the byte order of MXFP4 there. Does not know the
container; `gguf_export.py` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP, ModelConfig
from kdecode.model.mxfp4 import dequantise, unpack_codes
from kdecode.model.parameters import (
    ExpertWeight,
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
    Mxfp4,
)

Precision = Literal["released", "f32"]
StoredType = Literal["F32", "BF16", "MXFP4"]
Setting = bool | int | float | str | list[int]

ARCHITECTURES = {"kimi_k3": "kimi-k3", "kimi_linear": "kimi-linear"}
# Of one group of 32 weights: its scale, then 16 bytes of codes.
MXFP4_BLOCK_BYTES = 1 + MXFP4_GROUP // 2
_SIGMOID_GATING = 2


class GgufError(ValueError):
    """A checkpoint that cannot be written as GGUF; the message has the setting and the reason."""


@dataclass(frozen=True)
class GgufTensor:
    """shape: of the array that `make` returns; bytes in the last dimension unless F32."""

    name: str
    stored: StoredType
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.stored == "F32" else 1)


def check_supported(config: ModelConfig) -> None:
    """Raises GgufError for a model that llama.cpp's graphs do not have."""
    kinds = list(config.mlp_kinds)
    reasons = []
    if config.kda.num_heads != config.mla.num_heads:
        reasons.append(
            f"KDA has {config.kda.num_heads} heads and MLA {config.mla.num_heads}; the graph has "
            "one number"
        )
    if kinds != sorted(kinds):  # "dense" sorts before "moe"
        reasons.append("a dense layer follows a MoE layer; the graph has dense layers first")
    if config.model_type == "kimi_linear":
        if config.kda.is_gate_full_rank or config.mla.has_output_gate or config.mla.q_rank:
            reasons.append("its kimi-linear graph has low-rank KDA gates, no MLA gate, no q LoRA")
        if not config.moe.is_renormalized or not config.moe.num_shared:
            reasons.append("its kimi-linear graph renormalises and has shared experts")
    if reasons:
        raise GgufError(f"llama.cpp cannot run this model: {'; '.join(reasons)}.")


def settings(config: ModelConfig) -> Iterator[tuple[str, Setting]]:
    """Keys and values, without the vocabulary's."""
    arch, kda, mla, moe = ARCHITECTURES[config.model_type], config.kda, config.mla, config.moe
    values: dict[str, Setting | None] = {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.dense_width,
        "vocab_size": config.vocab_size,
        "attention.head_count": mla.num_heads,
        # MLA runs as one head over the latent; 0 marks a layer with recurrent state.
        "attention.head_count_kv": [int(kind == "mla") for kind in config.layer_kinds],
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "attention.q_lora_rank": mla.q_rank,
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.key_length": mla.cache_width,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.qk_dim,
        "attention.value_length_mla": mla.v_dim,
        "rope.dimension_count": mla.rope_dim,
        "ssm.conv_kernel": kda.conv_width,
        "kda.head_dim": kda.head_dim,
        "kda.gate_lower_bound": kda.gate_lower_bound,
        "expert_count": moe.num_experts,
        "expert_used_count": moe.top_k,
        "expert_shared_count": moe.num_shared,
        "expert_feed_forward_length": moe.expert_width,
        "expert_weights_scale": float(moe.routed_scaling),
        "expert_weights_norm": moe.is_renormalized,
        "expert_gating_func": _SIGMOID_GATING,
        "expert_latent_length": moe.latent_width,
        "leading_dense_block_count": config.mlp_kinds.count("dense"),
    }
    if config.model_type == "kimi_k3":
        values |= {
            "attn_res.block_size": config.attn_res_block or 0,
            "activation.situ_beta": config.activation.beta,
            "activation.situ_linear_beta": config.activation.linear_beta or 0.0,
        }
    yield from ((f"{arch}.{key}", value) for key, value in values.items() if value is not None)


def tensors(
    config: ModelConfig, parameters: ModelParameters, precision: Precision
) -> Iterator[GgufTensor]:
    """Every tensor in file order. Data are made when asked for, one tensor at a time."""
    names = _Names(config, precision)
    yield names.matrix("token_embd.weight", parameters.embed)
    for number, layer in enumerate(parameters.layers):
        yield from names.layer(f"blk.{number}.", layer)
    yield from names.mix("output_res_score.weight", parameters.final_mix)
    yield _vector("output_norm.weight", parameters.norm)
    yield names.matrix("output.weight", parameters.lm_head)


@dataclass(frozen=True)
class _Names:
    config: ModelConfig
    precision: Precision

    def layer(self, at: str, layer: LayerParameters) -> Iterator[GgufTensor]:
        yield _vector(at + "attn_norm.weight", layer.input_norm)
        yield _vector(at + "ffn_norm.weight", layer.post_norm)
        yield from self.mix(at + "attn_res_score.weight", layer.attn_mix)
        yield from self.mix(at + "ffn_res_score.weight", layer.mlp_mix)
        if isinstance(layer.attention, KdaParameters):
            yield from self._kda(at, layer.attention)
        else:
            yield from self._mla(at, layer.attention)
        if isinstance(layer.mlp, MlpParameters):
            yield from self._gated(at, "", layer.mlp)
        else:
            yield from self._moe(at, layer.mlp)

    def mix(self, name: str, mix: MixParameters | None) -> Iterator[GgufTensor]:
        if mix is not None:
            yield _vector(name, mix.norm.float() * mix.proj.float())

    def matrix(self, name: str, weight: Tensor) -> GgufTensor:
        return _matrix(name, weight.shape, lambda: weight, self.precision)

    def _matrices(self, at: str, matrices: Mapping[str, Tensor | None]) -> Iterator[GgufTensor]:
        """Those that the layer has, by name."""
        for name, weight in matrices.items():
            if weight is not None:
                yield self.matrix(f"{at}{name}.weight", weight)

    def _kda(self, at: str, p: KdaParameters) -> Iterator[GgufTensor]:
        matrices = {
            "attn_q": p.q_proj,
            "attn_k": p.k_proj,
            "attn_v": p.v_proj,
            "ssm_g": p.g_proj,
            "ssm_g_a": p.g_a_proj,
            "ssm_g_b": p.g_b_proj,
            "ssm_f_a": p.f_a_proj,
            "ssm_f_b": p.f_b_proj,
            "ssm_beta": p.b_proj,
            "attn_output": p.o_proj,
        }
        yield from self._matrices(at, matrices)
        for part, conv in (("q", p.q_conv), ("k", p.k_conv), ("v", p.v_conv)):
            width = conv.shape[1]
            yield _vector(f"{at}ssm_conv1d_{part}.weight", conv.reshape(1, -1, 1, width))
        decay = -torch.exp(p.a_log)
        is_k3 = self.config.model_type == "kimi_k3"
        yield _vector(at + "ssm_a", decay if is_k3 else decay.unsqueeze(-1))
        yield _vector(at + "ssm_dt.bias", p.dt_bias)
        yield _vector(at + "ssm_norm.weight", p.o_norm)

    def _mla(self, at: str, p: MlaParameters) -> Iterator[GgufTensor]:
        mla = self.config.mla
        matrices = {
            "attn_q": p.q_proj,
            "attn_q_a": p.q_a_proj,
            "attn_q_b": p.q_b_proj,
            "attn_kv_a_mqa": p.kv_a_proj,
            "attn_gate": p.g_proj,
            "attn_output": p.o_proj,
        }
        yield from self._matrices(at, matrices)
        if p.q_a_norm is not None:
            yield _vector(at + "attn_q_a_norm.weight", p.q_a_norm)
        yield _vector(at + "attn_kv_a_norm.weight", p.kv_a_norm)
        heads = p.kv_b_proj.view(mla.num_heads, mla.nope_dim + mla.v_dim, mla.kv_rank)
        keys, values = heads[:, : mla.nope_dim].transpose(1, 2), heads[:, mla.nope_dim :]
        yield _matrix(at + "attn_k_b.weight", keys.shape, lambda: keys, self.precision)
        yield _matrix(at + "attn_v_b.weight", values.shape, lambda: values, self.precision)

    def _gated(self, at: str, suffix: str, p: MlpParameters) -> Iterator[GgufTensor]:
        parts = {"gate": p.gate_proj, "up": p.up_proj, "down": p.down_proj}
        for part, weight in parts.items():
            yield self.matrix(f"{at}ffn_{part}{suffix}.weight", weight)

    def _moe(self, at: str, p: MoeParameters) -> Iterator[GgufTensor]:
        # llama.cpp's own converter stores the router in F32.
        yield _vector(at + "ffn_gate_inp.weight", p.router)
        yield _vector(at + "exp_probs_b.bias", p.router_bias)
        if p.latent_down is not None and p.latent_up is not None:
            yield self.matrix(at + "ffn_routed_down.weight", p.latent_down)
            yield self.matrix(at + "ffn_routed_up.weight", p.latent_up)
        if p.latent_norm is not None:
            yield _vector(at + "ffn_routed_norm.weight", p.latent_norm)
        if p.shared is not None:
            yield from self._gated(at, "_shexp", p.shared)
        for part, weights in (("gate", p.w1), ("up", p.w3), ("down", p.w2)):
            yield _experts(f"{at}ffn_{part}_exps.weight", weights, self.precision)


def _vector(name: str, value: Tensor) -> GgufTensor:
    return GgufTensor(name, "F32", tuple(value.shape), lambda: value.float().numpy())


def _matrix(
    name: str, shape: tuple[int, ...], make: Callable[[], Tensor], precision: Precision
) -> GgufTensor:
    """A bf16 weight of any number of dimensions."""
    if precision == "f32":
        return GgufTensor(name, "F32", tuple(shape), lambda: make().float().contiguous().numpy())
    byte_shape = (*shape[:-1], 2 * shape[-1])
    return GgufTensor(name, "BF16", byte_shape, lambda: _bytes(make()))


def _bytes(weight: Tensor) -> np.ndarray:
    return weight.contiguous().view(torch.uint8).numpy()


def _experts(name: str, weights: tuple[ExpertWeight, ...], precision: Precision) -> GgufTensor:
    first = weights[0]
    shape = (len(weights), *first.shape)
    if isinstance(first, Mxfp4) and precision == "released":
        byte_shape = (*shape[:2], shape[2] // MXFP4_GROUP * MXFP4_BLOCK_BYTES)

        def blocks() -> np.ndarray:
            return np.stack([mxfp4_blocks(w) for w in weights if isinstance(w, Mxfp4)])

        return GgufTensor(name, "MXFP4", byte_shape, blocks)

    def stacked() -> Tensor:
        return torch.stack([dequantise(w) if isinstance(w, Mxfp4) else w for w in weights])

    return _matrix(name, shape, stacked, precision)


def mxfp4_blocks(weight: Mxfp4) -> np.ndarray:
    """[out, in/32 * 17] bytes: a scale, then code i of the first half below code i of the second.

    Exact: the codes and the scale bytes are the same in both formats.
    """
    rows, cols = weight.shape
    groups = cols // MXFP4_GROUP
    codes = unpack_codes(weight.packed).view(rows, groups, 2, MXFP4_GROUP // 2)
    packed = codes[:, :, 0] | (codes[:, :, 1] << 4)
    return torch.cat([weight.scale.unsqueeze(-1), packed], dim=-1).view(rows, -1).numpy()
