"""The configurations of the two releases, as far as they are public."""

from __future__ import annotations

from typing import Any

K3_MLA_LAYERS = [*range(4, 93, 4), 93]
LINEAR_MLA_LAYERS = [4, 8, 12, 16, 20, 24, 27]


def kimi_k3() -> dict[str, Any]:
    """Kimi K3, nested as released."""
    text = {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 33792,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": list(K3_MLA_LAYERS),
            "kda_layers": [n for n in range(1, 94) if n not in K3_MLA_LAYERS],
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": 12,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*"],
            "config_groups": {
                "group_0": {
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "group_size": 32,
                        "strategy": "group",
                        "symmetric": True,
                        "dynamic": False,
                        "scale_dtype": "torch.uint8",
                    },
                    "input_activations": None,
                    "targets": ["Linear"],
                }
            },
        },
    }
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "media_placeholder_token_id": 163605,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "vision_config": {"hidden_size": 1024},
        "text_config": text,
    }


def kimi_linear() -> dict[str, Any]:
    """Kimi-Linear-48B-A3B."""
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": list(LINEAR_MLA_LAYERS),
            "head_dim": 128,
            "kda_layers": [n for n in range(1, 28) if n not in LINEAR_MLA_LAYERS],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
