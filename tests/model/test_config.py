"""Released configurations, and every kind of setting that must be refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from released import kimi_k3, kimi_linear

from kdecode.config import (
    MAX_CACHE_SCALE,
    MIN_CACHE_SCALE,
    Activation,
    ConfigError,
    EngineConfig,
    ModelConfig,
    environment,
    terminal_draws,
)
from kdecode.config_checkpoint import _K3_REQUIRED, _K3_REQUIRED_LINEAR


def test_k3_as_released() -> None:
    config = ModelConfig.from_checkpoint(kimi_k3())
    assert config.model_type == "kimi_k3"
    assert config.activation == Activation("situ", 4.0, 25.0)
    mla = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert config.layer_kinds.count("kda") == 69
    assert config.mlp_kinds == ("dense",) + ("moe",) * 92
    assert config.num_snapshots == 8
    assert config.kda.gate_lower_bound == -5.0
    assert config.kda.is_gate_full_rank
    assert config.mla.has_output_gate
    assert config.mla.q_rank == 1536
    assert config.moe.expert_format == "mxfp4"
    assert config.moe.latent_width == 3584
    assert config.moe.has_latent_norm
    assert config.moe.shared_width == 6144
    assert (config.bos_id, config.eos_id, config.pad_id) == (163584, 163586, 163839)


def test_kimi_linear_as_released() -> None:
    config = ModelConfig.from_checkpoint(kimi_linear())
    assert config.model_type == "kimi_linear"
    assert config.activation == Activation("silu")
    assert config.attn_res_block is None
    assert config.num_snapshots == 0
    assert config.kda.gate_lower_bound is None
    assert not config.kda.is_gate_full_rank
    assert not config.mla.has_output_gate
    assert config.mla.q_rank is None
    assert config.moe.expert_format == "bf16"
    assert config.moe.latent_width is None
    assert config.moe.routed_scaling == 2.446
    assert config.max_positions == 1048576


@pytest.mark.parametrize("model_type", ["kimi_k3", "kimi_linear"])
def test_k3_flat(model_type: str) -> None:
    nested = kimi_k3()
    ids = {key: nested[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    flat = {**nested["text_config"], **ids, "model_type": model_type}
    assert ModelConfig.from_checkpoint(flat) == ModelConfig.from_checkpoint(nested)


def test_from_a_directory_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(kimi_linear()))
    expected = ModelConfig.from_checkpoint(kimi_linear())
    assert ModelConfig.from_checkpoint(tmp_path) == expected
    assert ModelConfig.from_checkpoint(str(file)) == expected


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelConfig.from_checkpoint(tmp_path)
    for text in ("{", "[1]", "\udcff"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            ModelConfig.from_checkpoint(tmp_path)


K3_REQUIRED = sorted(
    set(kimi_k3()["text_config"])
    - {"num_key_value_heads", "tie_word_embeddings", "moe_layer_freq", "topk_method", "topk_group"}
    - {"use_grouped_topk", "num_expert_group", "num_nextn_predict_layers", "quantization_config"}
)


@pytest.mark.parametrize("key", K3_REQUIRED)
def test_a_missing_setting_is_named(key: str) -> None:
    document = kimi_k3()
    del document["text_config"][key]
    named = "model_max_length" if key == "max_position_embeddings" else key
    with pytest.raises(ConfigError, match=rf"text_config\.{named} is missing"):
        ModelConfig.from_checkpoint(document)


@pytest.mark.parametrize("key", sorted(kimi_k3()["text_config"]["linear_attn_config"]))
def test_a_missing_linear_setting_is_named(key: str) -> None:
    document = kimi_k3()
    del document["text_config"]["linear_attn_config"][key]
    with pytest.raises(ConfigError, match=rf"linear_attn_config\.{key} is missing"):
        ModelConfig.from_checkpoint(document)


@pytest.mark.parametrize("key", [*_K3_REQUIRED, *_K3_REQUIRED_LINEAR])
def test_null_never_chooses_the_other_familys_formula(key: str) -> None:
    for is_nested in (True, False):
        document = kimi_k3()
        body = document["text_config"]
        (body["linear_attn_config"] if key in _K3_REQUIRED_LINEAR else body)[key] = None
        ids = {name: document[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        flat = {**body, **ids, "model_type": "kimi_k3"}
        with pytest.raises(ConfigError, match=rf"{key} is null; a K3 checkpoint states a value"):
            ModelConfig.from_checkpoint(document if is_nested else flat)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -1),
        ("hidden_size", "7168"),
        ("hidden_size", 7168.0),
        ("hidden_size", True),
        ("hidden_size", None),
        ("hidden_act", "gelu"),
        ("activation_situ_beta", 0.0),
        ("activation_situ_linear_beta", float("inf")),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("moe_renormalize", 1),
        ("first_k_dense_replace", 94),
        ("num_experts_per_token", 897),
        ("moe_intermediate_size", 3080),
        ("routed_expert_hidden_size", 3590),
        ("routed_scaling_factor", -1.0),
        ("num_key_value_heads", 8),
        ("attn_res_block_size", 0),
        ("eos_token_id", 163840),
        ("linear_attn_config", [1]),
        ("moe_router_activation_func", "softmax"),
        ("num_expert_group", 8),
        ("topk_group", 2),
        ("moe_layer_freq", 2),
        ("mla_use_nope", False),
        ("tie_word_embeddings", True),
        ("tie_word_embeddings", 0),
        ("num_nextn_predict_layers", 1),
        ("topk_method", "greedy"),
        ("rope_scaling", {"type": "yarn"}),
        ("attention_bias", True),
        ("sliding_window", 4096),
        ("model_type", "deepseek_v3"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(key: str, value: Any) -> None:
    document = kimi_k3()
    document["text_config"][key] = value
    with pytest.raises(ConfigError, match=re.escape(key)) as error:
        ModelConfig.from_checkpoint(document)
    assert str(value) in str(error.value) or repr(value) in str(error.value)


def test_an_unknown_outer_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logit_scale is 2\.0"):
        ModelConfig.from_checkpoint({**kimi_k3(), "logit_scale": 2.0})
    with pytest.raises(ConfigError, match="model_type is 'llama'"):
        ModelConfig.from_checkpoint({**kimi_linear(), "model_type": "llama"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(use_bias=True), r"linear_attn_config\.use_bias is True"),
        (lambda c: c.update(gate_lower_bound=5.0), "gate_lower_bound is 5.0"),
        (lambda c: c.update(short_conv_kernel_size=1), "short_conv_kernel_size is 1"),
        (lambda c: c["kda_layers"].remove(1), "92 of 93 layers; layer 1 "),
        (lambda c: c["kda_layers"].append(4), "layer 4 .* listed already"),
        (lambda c: c["kda_layers"].append(94), "it must be from 1 to 93"),
        (lambda c: c["kda_layers"].append(0), "is 0"),
        (lambda c: c["kda_layers"].append("1"), "whole number"),
        (lambda c: c.update(full_attn_layers=4), "must be a list"),
    ],
)
def test_linear_attention_settings(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    document = kimi_k3()
    change(document["text_config"]["linear_attn_config"])
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_checkpoint(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quant_method",), "gptq"),
        (("format",), "nvfp4-pack-quantized"),
        (("kv_cache_scheme",), {"num_bits": 8}),
        (("config_groups",), {}),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
        (("config_groups", "group_0", "format"), "pack-quantized"),
        (("config_groups", "group_0", "weights", "num_bits"), 8),
        (("config_groups", "group_0", "weights", "group_size"), 16),
        (("config_groups", "group_0", "weights", "type"), "int"),
        (("config_groups", "group_0", "weights", "symmetric"), False),
        (("config_groups", "group_0", "weights", "scale_dtype"), "torch.float8_e4m3fn"),
    ],
)
def test_other_quantisations_are_refused(path: tuple[str, ...], value: Any) -> None:
    document = kimi_k3()
    *parents, key = path
    section = document["text_config"]["quantization_config"]
    for parent in parents:
        section = section[parent]
    section[key] = value
    with pytest.raises(ConfigError, match=path[0] if len(path) == 1 else key):
        ModelConfig.from_checkpoint(document)


def test_the_format_may_stand_in_the_group() -> None:
    document = kimi_k3()
    quantisation = document["text_config"].pop("quantization_config")
    quantisation["config_groups"]["group_0"]["format"] = quantisation.pop("format")
    document["quantization_config"] = quantisation
    assert ModelConfig.from_checkpoint(document).moe.expert_format == "mxfp4"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_backend": "fast"}, "decode_backend is 'fast'; .* auto, latency_specialized"),
        ({"device": "tpu"}, "device is 'tpu'; it must be cpu, cuda or cuda:N"),
        ({"device": "cuda:-1"}, "device is 'cuda:-1'"),
        ({"device": "cuda:01"}, "device is 'cuda:01'"),
        ({"device": None}, "device is None"),
        (
            {
                "device": "cuda",
                "decode_backend": "latency_specialized",
                "trunk_format": "int8",
            },
            "trunk_format is 'int8' and device 'cuda'; only the kernels of the CPU",
        ),
        ({"device": "cuda:1", "lossless_packing": "on"}, "set lossless_packing to 'auto'"),
        ({"isa": "sse2"}, "isa is 'sse2'"),
        ({"cache_dtype": "fp16"}, "cache_dtype is 'fp16'"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"page_tokens": True}, "page_tokens is True"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"cache_budget_bytes": 1.5}, "cache_budget_bytes is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"cache_scale": 1.0}, "only an fp8 cache has a scale"),
        *(
            (
                {"cache_dtype": "fp8", "cache_scale": scale},
                rf"cache_scale is {re.escape(str(scale))}; {limits}",
            )
            for scale, limits in (
                (0.0, r"it must be from 1/448 \(0.002232\) to 64"),
                (-1.0, "it must be from 1/448"),
                (1e-30, "it must be from 1/448"),
                (0.002, "it must be from 1/448"),
                (64.5, "it must be from 1/448"),
                (1e30, "it must be from 1/448"),
                (float("nan"), "it must be a finite number"),
                (float("inf"), "it must be a finite number"),
            )
        ),
    ],
)
def test_engine_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_that_are_accepted_by_name(device: str) -> None:
    assert EngineConfig(device=device).device == device


def test_the_scale_of_an_fp8_cache_is_never_guessed() -> None:
    assert EngineConfig().layer_cache_scale(3, 0.25) == 1.0
    given = EngineConfig(cache_dtype="fp8", cache_scale=0.5)
    assert given.layer_cache_scale(3, None) == 0.5
    assert given.layer_cache_scale(3, 0.25) == 0.25
    with pytest.raises(ConfigError, match=r"layer 3 .*Set cache_scale"):
        EngineConfig(cache_dtype="fp8").layer_cache_scale(3, None)


def test_limits_of_a_cache_scale_keep_one_a_normal_number() -> None:
    smallest, largest = 2.0**-6, 448.0
    for scale in (MIN_CACHE_SCALE, MAX_CACHE_SCALE):
        config = EngineConfig(cache_dtype="fp8", cache_scale=scale)
        assert smallest <= 1 / config.layer_cache_scale(0, None) <= largest
    with pytest.raises(ConfigError, match=r"the scale of layer 3's cache is 1e-09; it must be"):
        EngineConfig(cache_dtype="fp8").layer_cache_scale(3, 1e-9)


def test_threads() -> None:
    assert EngineConfig(num_threads=3).resolved_threads() == 3
    assert EngineConfig().resolved_threads() >= 1


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pwd.getpwuid", lambda user: SimpleNamespace(pw_dir="/of/the/system"))
    names = ("KDECODE_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    for values, expected in (
        (("/own", "/xdg", "/home/a"), "/own"),
        (("own/x", "/xdg", "/home/a"), f"{tmp_path}/own/x"),
        (("~", "/xdg", "/home/a"), "/home/a"),
        (("~/x", "/xdg", "/home/a"), "/home/a/x"),
        (("~/x", None, ""), "/of/the/system/x"),
        (("/own/~", None, None), "/own/~"),
        (("", "/xdg", "/home/a"), "/xdg/kdecode"),
        ((None, "/xdg", None), "/xdg/kdecode"),
        ((None, "relative", "/home/a"), "/home/a/.cache/kdecode"),
        ((None, "", "/home/a"), "/home/a/.cache/kdecode"),
        ((None, None, "/home/a"), "/home/a/.cache/kdecode"),
        ((None, None, ""), "/of/the/system/.cache/kdecode"),
        ((None, None, "home"), "/of/the/system/.cache/kdecode"),
        ((None, None, None), "/of/the/system/.cache/kdecode"),
    ):
        for name, value in zip(names, values, strict=True):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert environment().cache_dir == Path(expected), values


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("KDECODE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"HOME is '' .* KDECODE_CACHE_DIR"):
        environment()
    monkeypatch.setenv("KDECODE_CACHE_DIR", "/own")
    assert environment().cache_dir == Path("/own")


@pytest.mark.parametrize(("term", "draws"), [("xterm", True), ("dumb", False), ("", False)])
def test_terminals(monkeypatch: pytest.MonkeyPatch, term: str, draws: bool) -> None:
    monkeypatch.setenv("TERM", term)
    assert terminal_draws() is draws
