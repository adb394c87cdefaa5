"""GGUF files: written by us, read by the gguf package, which also dequantises them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kdecode.config import ModelConfig
from kdecode.model.gguf_export import export_gguf, tensor_types
from kdecode.model.gguf_tensors import GgufError, check_supported
from kdecode.model.mxfp4 import dequantise
from kdecode.model.parameters import KdaParameters, MlaParameters, MoeParameters, Mxfp4
from kdecode.model.tokenizer import Tokenizer
from kdecode.model.weights import CheckpointReader


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Every tensor in fp32, and every setting."""
    reader = gguf.GGUFReader(path)
    arrays = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return arrays, {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def k3(mini_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    paths = {"released": folder / "released.gguf", "f32": folder / "f32.gguf"}
    for precision, path in paths.items():
        export_gguf(mini_checkpoint, path, precision)  # type: ignore[arg-type]
    return paths


def test_both_precisions_hold_the_same_numbers(k3: dict[str, Path]) -> None:
    released, f32 = _read(k3["released"])[0], _read(k3["f32"])[0]
    assert released.keys() == f32.keys()
    for name, array in f32.items():
        assert np.array_equal(released[name], array), name
    types = tensor_types(k3["released"])
    assert {kind for kind, _ in types.values()} == {"F32", "BF16", "MXFP4"}
    assert {kind for kind, _ in tensor_types(k3["f32"]).values()} == {"F32"}
    assert {types[f"blk.1.ffn_{part}_exps.weight"][0] for part in ("gate", "up", "down")} == {
        "MXFP4"
    }


def test_tensors_are_the_checkpoints(mini_checkpoint: Path, k3: dict[str, Path]) -> None:
    reader = CheckpointReader(mini_checkpoint)
    config, model = reader.config, reader.load_model()
    arrays, _ = _read(k3["released"])

    def same(name: str, tensor: torch.Tensor) -> None:
        assert np.array_equal(arrays[name], tensor.float().numpy()), name

    same("token_embd.weight", model.embed)
    same("output.weight", model.lm_head)
    assert model.final_mix is not None
    same("output_res_score.weight", model.final_mix.norm.float() * model.final_mix.proj.float())
    kda, mla, moe = (
        model.layers[1].attention,
        model.layers[3].attention,
        model.layers[1].mlp,
    )
    assert isinstance(kda, KdaParameters)
    assert kda.g_proj is not None
    same("blk.1.attn_k.weight", kda.k_proj)
    same("blk.1.ssm_g.weight", kda.g_proj)
    same("blk.1.ssm_a", -kda.a_log.exp())
    same("blk.1.ssm_dt.bias", kda.dt_bias)
    same("blk.1.ssm_conv1d_v.weight", kda.v_conv.reshape(1, -1, 1, config.kda.conv_width))
    assert isinstance(mla, MlaParameters)
    assert mla.g_proj is not None
    heads = mla.kv_b_proj.view(config.mla.num_heads, -1, config.mla.kv_rank)
    same("blk.3.attn_k_b.weight", heads[:, : config.mla.nope_dim].transpose(1, 2))
    same("blk.3.attn_v_b.weight", heads[:, config.mla.nope_dim :])
    same("blk.3.attn_gate.weight", mla.g_proj)
    assert isinstance(moe, MoeParameters)
    same("blk.1.ffn_gate_inp.weight", moe.router)
    same("blk.1.exp_probs_b.bias", moe.router_bias)
    for part, weights in (("gate", moe.w1), ("up", moe.w3), ("down", moe.w2)):
        dense = [dequantise(w) for w in weights if isinstance(w, Mxfp4)]
        same(f"blk.1.ffn_{part}_exps.weight", torch.stack(dense))


def test_settings_and_vocabulary(mini_checkpoint: Path, k3: dict[str, Path]) -> None:
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    _, found = _read(k3["released"])
    assert found["general.architecture"] == "kimi-k3"
    wanted = {
        "block_count": 9,
        "attention.head_count_kv": [0, 0, 0, 1, 0, 0, 0, 1, 1],
        "attention.key_length": config.mla.cache_width,
        "attention.key_length_mla": config.mla.qk_dim,
        "attn_res.block_size": 4,
        "expert_latent_length": config.moe.latent_width,
        "kda.gate_lower_bound": -5.0,
        "leading_dense_block_count": 1,
        "expert_weights_norm": True,
    }
    assert {key: found[f"kimi-k3.{key}"] for key in wanted} == wanted
    tokenizer = Tokenizer.from_directory(mini_checkpoint, config.vocab_size)
    tokens = found["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == config.vocab_size
    # Every token of several bytes is made by one merge of two earlier tokens, in order.
    longer = [t for t in tokens[: tokenizer.num_base] if len(t) > 1]
    merges = [merge.split(" ") for merge in found["tokenizer.ggml.merges"]]
    assert ["".join(pair) for pair in merges] == longer
    rank = {token: number for number, token in enumerate(tokens)}
    assert all(max(rank[a], rank[b]) < rank[a + b] for a, b in merges)


def test_kimi_linear_has_its_own_names(mini_linear_checkpoint: Path, tmp_path: Path) -> None:
    export_gguf(mini_linear_checkpoint, tmp_path / "m.gguf", "released")
    arrays, found = _read(tmp_path / "m.gguf")
    assert found["general.architecture"] == "kimi-linear"
    assert "kimi-linear.kda.gate_lower_bound" not in found
    assert not any("res_score" in name or "ffn_routed" in name for name in arrays)
    assert arrays["blk.1.ssm_a"].shape == (4, 1)
    assert tensor_types(tmp_path / "m.gguf")["blk.1.ffn_up_exps.weight"][0] == "BF16"
    attention = CheckpointReader(mini_linear_checkpoint).load_layer(1).attention
    assert isinstance(attention, KdaParameters)
    assert attention.g_b_proj is not None
    assert np.array_equal(arrays["blk.1.ssm_g_b.weight"], attention.g_b_proj.float().numpy())


def test_what_llama_cpp_cannot_run_is_refused(mini_checkpoint: Path) -> None:
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    check_supported(config)
    heads = replace(config, kda=replace(config.kda, num_heads=8))
    with pytest.raises(GgufError, match="KDA has 8 heads and MLA 4"):
        check_supported(heads)
    kinds = ("moe", "dense", *config.mlp_kinds[2:])
    with pytest.raises(GgufError, match="a dense layer follows a MoE layer"):
        check_supported(replace(config, mlp_kinds=kinds))
    with pytest.raises(GgufError, match="low-rank KDA gates"):
        check_supported(replace(config, model_type="kimi_linear"))


def test_without_the_package_the_extra_is_named(
    mini_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GgufError, match=r"kdecode\[peers\]"):
        export_gguf(mini_checkpoint, tmp_path / "m.gguf", "released")
