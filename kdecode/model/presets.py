"""Sizes of the random-weight models that `make-checkpoint` writes, as released ``config.json``.

Owns the presets and the form of the two configuration files. K3 presets have every mechanism of the
release (attention residuals, gated MLA, latent MXFP4 experts, a last layer that is MLA whatever the
pattern says); Kimi-Linear presets have the older forms of the same mechanisms and bf16 experts. The
field names are the released ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Offsets of special tokens from the first one, as in the release.
BOS_OFFSET, EOS_OFFSET, MEDIA_OFFSET, PAD_OFFSET = 0, 2, 21, 255
NUM_SPECIALS = 256


@dataclass(frozen=True)
class Preset:
    """Sizes of one model; the letters are in ARCHITECTURE.md."""

    family: Literal["kimi_k3", "kimi_linear"]
    hidden: int
    vocab: int
    num_layers: int
    mla_layers: tuple[int, ...]  # 0-based
    kda_heads: int
    kda_dim: int
    mla_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_width: int
    num_experts: int
    top_k: int
    expert_width: int
    num_shared: int
    latent: int | None = None
    attn_res_block: int | None = None
    max_positions: int = 1_048_576


_MINI = {
    "hidden": 192,
    "vocab": 1536,
    "num_layers": 9,
    "mla_layers": (3, 7, 8),
    "kda_heads": 4,
    "kda_dim": 32,
    "mla_heads": 4,
    "kv_rank": 64,
    "nope_dim": 32,
    "rope_dim": 16,
    "v_dim": 32,
    "dense_width": 320,
    "num_experts": 24,
    "top_k": 4,
    "expert_width": 64,
}
_SMALL = {
    "hidden": 768,
    "vocab": 16384,
    "num_layers": 9,
    "mla_layers": (3, 7, 8),
    "kda_heads": 8,
    "kda_dim": 64,
    "mla_heads": 8,
    "kv_rank": 128,
    "nope_dim": 64,
    "rope_dim": 32,
    "v_dim": 64,
    "dense_width": 2048,
    "num_experts": 32,
    "top_k": 4,
    "expert_width": 384,
}
_MEDIUM = {
    "hidden": 2048,
    "vocab": 32768,
    "num_layers": 12,
    "mla_layers": (3, 7, 11),
    "kda_heads": 16,
    "kda_dim": 128,
    "mla_heads": 16,
    "kv_rank": 512,
    "nope_dim": 128,
    "rope_dim": 64,
    "v_dim": 128,
    "dense_width": 6144,
    "num_experts": 64,
    "top_k": 8,
    "expert_width": 1024,
}


# For any number of ranks up to 16: everything that they divide is a multiple of it.
_MINI_16 = {
    **_MINI,
    "hidden": 256,
    "num_layers": 5,
    "mla_layers": (3, 4),
    "kda_heads": 16,
    "mla_heads": 16,
    "dense_width": 512,
}


def _k3(sizes: dict[str, Any], **more: Any) -> Preset:
    return Preset(family="kimi_k3", num_shared=2, attn_res_block=4, **sizes, **more)


def _linear(sizes: dict[str, Any], **changes: Any) -> Preset:
    return Preset(family="kimi_linear", num_shared=1, q_rank=None, **{**sizes, **changes})


PRESETS: dict[str, Preset] = {
    "mini": _k3(_MINI, q_rank=64, latent=96),
    "small": _k3(_SMALL, q_rank=256, latent=384),
    "medium": _k3(_MEDIUM, q_rank=768, latent=1024),
    # Each rank has a group of 32 columns of an MXFP4 expert.
    "mini-16": _k3({**_MINI_16, "num_experts": 32, "expert_width": 512}, q_rank=64, latent=128),
    "kimi-linear-mini": _linear(_MINI),
    "kimi-linear-mini-16": _linear(_MINI_16, num_experts=16, expert_width=256),
    "kimi-linear-small": _linear(_SMALL, expert_width=192),
    # bf16 experts: fewer and narrower ones keep the file near the size of K3's medium.
    "kimi-linear-medium": _linear(_MEDIUM, num_experts=32, expert_width=512),
}

# The sizes of the releases themselves: for shapes, no checkpoint of them is ever made up.
RELEASES: dict[str, Preset] = {
    "kimi-k3": Preset(
        family="kimi_k3",
        hidden=7168,
        vocab=163_840,
        num_layers=93,
        mla_layers=(*range(3, 92, 4), 92),
        kda_heads=96,
        kda_dim=128,
        mla_heads=96,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        dense_width=33_792,
        num_experts=896,
        top_k=16,
        expert_width=3072,
        num_shared=2,
        latent=3584,
        attn_res_block=12,
    ),
    "kimi-linear-48b": Preset(
        family="kimi_linear",
        hidden=2304,
        vocab=163_840,
        num_layers=27,
        mla_layers=(3, 7, 11, 15, 19, 23, 26),
        kda_heads=32,
        kda_dim=128,
        mla_heads=32,
        q_rank=None,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        dense_width=9216,
        num_experts=256,
        top_k=8,
        expert_width=1024,
        num_shared=1,
    ),
}


def released_config(preset: Preset) -> dict[str, Any]:
    """The ``config.json`` of a preset, in the form of its family's release."""
    text = _common(preset)
    if preset.family == "kimi_linear":
        return {
            "architectures": ["KimiLinearForCausalLM"],
            **text,
            "head_dim": preset.hidden // preset.mla_heads,
            "hidden_act": "silu",
            "model_max_length": preset.max_positions,
            "rope_theta": 10000.0,
            "routed_scaling_factor": 2.446,
        }
    text |= {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": preset.attn_res_block,
        "hidden_act": "situ",
        "latent_moe_use_norm": True,
        "max_position_embeddings": preset.max_positions,
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": preset.latent,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "quantization_config": _quantisation(),
    }
    text["linear_attn_config"] |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": preset.vocab - NUM_SPECIALS + MEDIA_OFFSET,
        "text_config": {"architectures": ["KimiLinearForCausalLM"], **text},
        "tie_word_embeddings": False,
    }


def _common(preset: Preset) -> dict[str, Any]:
    first_special = preset.vocab - NUM_SPECIALS
    mla = [layer + 1 for layer in preset.mla_layers]
    return {
        "model_type": "kimi_linear",
        "bos_token_id": first_special + BOS_OFFSET,
        "dtype": "bfloat16",
        "eos_token_id": first_special + EOS_OFFSET,
        "first_k_dense_replace": 1,
        "hidden_size": preset.hidden,
        "initializer_range": 0.02,
        "intermediate_size": preset.dense_width,
        "kv_lora_rank": preset.kv_rank,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "head_dim": preset.kda_dim,
            "kda_layers": [n for n in range(1, preset.num_layers + 1) if n not in mla],
            "num_heads": preset.kda_heads,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_intermediate_size": preset.expert_width,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": preset.mla_heads,
        "num_expert_group": 1,
        "num_experts": preset.num_experts,
        "num_experts_per_token": preset.top_k,
        "num_hidden_layers": preset.num_layers,
        "num_key_value_heads": preset.mla_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": preset.num_shared,
        "pad_token_id": first_special + PAD_OFFSET,
        "q_lora_rank": preset.q_rank,
        "qk_nope_head_dim": preset.nope_dim,
        "qk_rope_head_dim": preset.rope_dim,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": preset.v_dim,
        "vocab_size": preset.vocab,
    }


def _quantisation() -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*routed_expert_(down|up)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
