"""The roster against what is published of the releases: names, shapes and totals."""

from __future__ import annotations

import pytest
from released import kimi_k3, kimi_linear

from kdecode.config import ModelConfig
from kdecode.model.roster import (
    K3_VISION_BYTES,
    K3_VISION_TENSORS,
    TensorSpec,
    layer_slots,
    model_slots,
    roster,
)

Expected = dict[str, tuple[tuple[int, ...], str]]


@pytest.fixture(scope="module")
def k3() -> ModelConfig:
    return ModelConfig.from_checkpoint(kimi_k3())


@pytest.fixture(scope="module")
def linear() -> ModelConfig:
    return ModelConfig.from_checkpoint(kimi_linear())


def found(specs: dict[str, TensorSpec], start: str) -> Expected:
    """Released name without its start -> shape and dtype."""
    return {
        spec.name.removeprefix(start): (spec.shape, spec.dtype)
        for spec in specs.values()
        if not spec.is_optional
    }


def matrices(**shapes: tuple[int, int]) -> Expected:
    return {f"{name}.weight": (shape, "BF16") for name, shape in shapes.items()}


def prefixed(prefix: str, names: Expected) -> Expected:
    return {prefix + name: value for name, value in names.items()}


K3_EVERY_LAYER: Expected = {
    **{
        f"{name}.weight": ((7168,), "BF16")
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        )
    },
    **matrices(self_attention_res_proj=(1, 7168), mlp_res_proj=(1, 7168)),
}
K3_KDA: Expected = {
    **matrices(
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (12288, 7168)),
        b_proj=(96, 7168),
        f_a_proj=(128, 7168),
        f_b_proj=(12288, 128),
        o_proj=(7168, 12288),
    ),
    **{f"{part}_conv1d.weight": ((12288, 1, 4), "F32") for part in "qkv"},
    "A_log": ((128,), "F32"),
    "dt_bias": ((12288,), "F32"),
    "o_norm.weight": ((128,), "F32"),
}
K3_MLA: Expected = {
    **matrices(
        q_a_proj=(1536, 7168),
        q_b_proj=(18432, 1536),
        kv_a_proj_with_mqa=(576, 7168),
        kv_b_proj=(24576, 512),
        g_proj=(12288, 7168),
        o_proj=(7168, 12288),
    ),
    "q_a_layernorm.weight": ((1536,), "BF16"),
    "kv_a_layernorm.weight": ((512,), "BF16"),
}


def test_k3_totals(k3: ModelConfig) -> None:
    specs = list(roster(k3))
    assert len({spec.name for spec in specs}) == len(specs) == 497_052
    assert len(specs) + K3_VISION_TENSORS == 497_220
    assert sum(spec.num_bytes for spec in specs) + K3_VISION_BYTES == 1_560_860_324_864


def test_k3_outside_the_layers(k3: ModelConfig) -> None:
    assert found(model_slots(k3, "language_model."), "language_model.") == {
        "model.embed_tokens.weight": ((163840, 7168), "BF16"),
        "lm_head.weight": ((163840, 7168), "BF16"),
        "model.norm.weight": ((7168,), "BF16"),
        "model.output_attn_res_norm.weight": ((7168,), "BF16"),
        "model.output_attn_res_proj.weight": ((1, 7168), "BF16"),
    }


def test_k3_dense_kda_layer(k3: ModelConfig) -> None:
    prefix = "language_model.model.layers.0."
    dense = matrices(gate_proj=(33792, 7168), up_proj=(33792, 7168), down_proj=(7168, 33792))
    assert found(layer_slots(k3, 0, "language_model."), prefix) == {
        **K3_EVERY_LAYER,
        **prefixed("self_attn.", K3_KDA),
        **prefixed("mlp.", dense),
    }


def test_k3_moe_mla_layer(k3: ModelConfig) -> None:
    prefix = "language_model.model.layers.92."
    names = found(layer_slots(k3, 92, "language_model."), prefix)
    experts = {name: value for name, value in names.items() if ".experts." in name}
    assert len(experts) == 896 * 6
    last = "block_sparse_moe.experts.895."
    assert {name: experts[name] for name in experts if name.startswith(last)} == {
        f"{last}w1.weight_packed": ((3072, 1792), "U8"),
        f"{last}w1.weight_scale": ((3072, 112), "U8"),
        f"{last}w3.weight_packed": ((3072, 1792), "U8"),
        f"{last}w3.weight_scale": ((3072, 112), "U8"),
        f"{last}w2.weight_packed": ((3584, 1536), "U8"),
        f"{last}w2.weight_scale": ((3584, 96), "U8"),
    }
    moe: Expected = {
        **matrices(
            gate=(896, 7168),
            routed_expert_down_proj=(3584, 7168),
            routed_expert_up_proj=(7168, 3584),
        ),
        "gate.e_score_correction_bias": ((896,), "F32"),
        "routed_expert_norm.weight": ((3584,), "BF16"),
        **prefixed(
            "shared_experts.",
            matrices(gate_proj=(6144, 7168), up_proj=(6144, 7168), down_proj=(7168, 6144)),
        ),
    }
    assert {name: names[name] for name in names if name not in experts} == {
        **K3_EVERY_LAYER,
        **prefixed("self_attn.", K3_MLA),
        **prefixed("block_sparse_moe.", moe),
    }


def test_kimi_linear_names(linear: ModelConfig) -> None:
    names = {spec.name: spec.shape for spec in roster(linear)}
    assert "model.output_attn_res_norm.weight" not in names
    assert names["lm_head.weight"] == (163840, 2304)
    kda = "model.layers.1.self_attn."
    assert names[f"{kda}A_log"] == (1, 1, 32, 1)
    assert names[f"{kda}g_a_proj.weight"] == (128, 2304)
    assert names[f"{kda}g_b_proj.weight"] == (4096, 128)
    assert f"{kda}g_proj.weight" not in names
    mla = "model.layers.3.self_attn."
    assert names[f"{mla}q_proj.weight"] == (6144, 2304)
    assert f"{mla}g_proj.weight" not in names
    assert f"{mla}q_a_proj.weight" not in names
    moe = "model.layers.26.block_sparse_moe."
    assert names[f"{moe}experts.255.w2.weight"] == (2304, 1024)
    assert names[f"{moe}shared_experts.up_proj.weight"] == (1024, 2304)
    assert f"{moe}routed_expert_norm.weight" not in names
