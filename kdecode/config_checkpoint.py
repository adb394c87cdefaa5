"""The released ``config.json`` as a `ModelConfig`: nested under ``text_config`` or flat.

Owns the table of known settings: the ones that are read, the ones with one supported value, and the
ones that no formula uses. Any other setting is refused by name and value, because it could change
the maths. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdecode.config import (
    MXFP4_GROUP,
    Activation,
    ConfigError,
    KdaConfig,
    LayerKind,
    MlaConfig,
    MlpKind,
    ModelConfig,
    MoeConfig,
    check_choice,
    check_int,
    check_number,
)
from kdecode.config_json import named, read_json_object, shown

CONFIG_FILE = "config.json"

# Sizes far above any that was released, so that a wrong configuration ends in an error and not in
# the memory of a machine: a mixture of experts alone has six tensors an expert and a layer.
MAX_LAYERS = 1024
MAX_EXPERTS = 8192
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 40


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Settings that have one supported value, because another one is another model.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
_FIXED_REQUIRED = ("mla_use_nope", "moe_router_activation_func")

# Settings that are read below.
_READ = words(
    """
    activation_situ_beta activation_situ_linear_beta attn_res_block_size bos_token_id
    eos_token_id first_k_dense_replace hidden_act hidden_size intermediate_size kv_lora_rank
    latent_moe_use_norm linear_attn_config max_position_embeddings mla_use_output_gate
    model_max_length model_type moe_intermediate_size moe_renormalize num_attention_heads
    num_experts num_experts_per_token num_hidden_layers num_key_value_heads num_shared_experts
    pad_token_id q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config rms_norm_eps
    routed_expert_hidden_size routed_scaling_factor v_head_dim vocab_size
    """
)
_READ_LINEAR = words(
    """
    full_attn_layers gate_lower_bound head_dim kda_layers num_heads short_conv_kernel_size
    use_full_rank_gate
    """
)
# What a K3 checkpoint has to state, although Kimi-Linear's form of the same key may be absent. Null
# is no statement: it would silently choose Kimi-Linear's formula.
_K3_REQUIRED = (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
)
_K3_REQUIRED_LINEAR = ("gate_lower_bound", "use_full_rank_gate")

# Settings that no formula uses: rotation (there is none), training, the serialiser's own, and the
# generation defaults that it writes into every config.
IRRELEVANT = words(
    """
    _attn_implementation _name_or_path architectures attention_dropout auto_map aux_loss_alpha
    dtype ep_size head_dim ignore_index initializer_range keys_to_ignore_at_inference
    media_placeholder_token_id output_router_logits pretraining_tp qk_head_dim rope_parameters
    rope_theta seq_aux tokenizer_class torch_dtype transformers_version unk_token_id use_cache
    use_grouped_topk use_unified_vision_chunk video_placeholder vision_config
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder top_k top_p torchscript typical_p use_bfloat16
    """
)


def read_json(path: Path) -> Mapping[str, Any]:
    file = path / CONFIG_FILE if path.is_dir() else path
    return read_json_object(file, ConfigError)


@dataclass(frozen=True)
class Settings:
    """One JSON object with checked access; ``where`` prefixes the names in errors."""

    values: Mapping[str, Any]
    where: str = ""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.where}{key} is missing from the checkpoint's configuration.")
        return self.values[key]

    def integer(self, key: str, at_least: int = 1, at_most: int = MAX_WIDTH) -> int:
        return check_int(self.where + key, self.get(key), at_least=at_least, at_most=at_most)

    def number(self, key: str, above: float = -math.inf, below: float = math.inf) -> float:
        return check_number(self.where + key, self.get(key), above=above, below=below)

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}{key} is {shown(value)}; it must be true or false.")
        return value

    def section(self, key: str) -> Settings:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}{key} is {shown(value)}; it must be an object.")
        return Settings(value, f"{self.where}{named(key)}.")

    def require(self, expected: Mapping[str, Any]) -> None:
        """Settings that, where present, have exactly these values."""
        for key, value in expected.items():
            found = self.values.get(key, value)
            if found != value or isinstance(found, bool) != isinstance(value, bool):
                raise ConfigError(
                    f"{self.where}{key} is {shown(found)}; only {value!r} is supported."
                )

    def require_stated(self, keys: Iterable[str]) -> None:
        """Settings that are there and not null."""
        for key in keys:
            if self.get(key) is None:
                raise ConfigError(f"{self.where}{key} is null; a K3 checkpoint states a value.")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        for key in sorted(set(self.values) - known):
            raise ConfigError(
                f"{self.where}{named(key)} is {shown(self.values[key])}; this setting is unknown "
                "and could change the maths."
            )


def parse_model(document: Mapping[str, Any]) -> ModelConfig:
    text, is_k3 = _text_settings(document)
    known = _READ | IRRELEVANT | frozenset(_FIXED)
    text.refuse_unknown(known)
    linear = text.section("linear_attn_config")
    linear.refuse_unknown(_READ_LINEAR)
    for key in _FIXED_REQUIRED:
        text.get(key)
    if is_k3:
        text.require_stated(_K3_REQUIRED)
        linear.require_stated(_K3_REQUIRED_LINEAR)
    text.require(_FIXED)
    heads = text.integer("num_attention_heads", at_most=MAX_HEADS)
    text.require({"num_key_value_heads": heads})

    vocab = text.integer("vocab_size", at_most=MAX_VOCABULARY)
    num_layers = text.integer("num_hidden_layers", at_most=MAX_LAYERS)
    num_dense = text.integer("first_k_dense_replace", 0, num_layers)
    rms_eps = text.number("rms_norm_eps", above=0.0, below=1.0)
    mlp_kinds: list[MlpKind] = ["dense"] * num_dense
    mlp_kinds += ["moe"] * (num_layers - num_dense)
    positions = "max_position_embeddings"
    return ModelConfig(
        model_type="kimi_k3" if is_k3 else "kimi_linear",
        hidden_size=text.integer("hidden_size"),
        vocab_size=vocab,
        layer_kinds=_layer_kinds(linear, num_layers),
        mlp_kinds=tuple(mlp_kinds),
        dense_width=text.integer("intermediate_size"),
        activation=_activation(text),
        rms_eps=rms_eps,
        attn_res_block=optional_int(text, "attn_res_block_size"),
        kda=_kda(linear),
        mla=_mla(text, heads, rms_eps),
        moe=_moe(text),
        max_positions=text.integer(
            positions if text.has(positions) else "model_max_length", at_most=MAX_POSITIONS
        ),
        bos_id=text.integer("bos_token_id", 0, vocab - 1),
        eos_id=text.integer("eos_token_id", 0, vocab - 1),
        pad_id=text.integer("pad_token_id", 0, vocab - 1),
    )


def _text_settings(document: Mapping[str, Any]) -> tuple[Settings, bool]:
    """The language model's settings, and whether they are K3's."""
    outer = Settings(document)
    check_choice("model_type", outer.get("model_type"), ("kimi_k3", "kimi_linear"))
    if "text_config" not in document:
        # Kimi-Linear has no attention residuals; a flat K3 may carry either model_type.
        is_k3 = document["model_type"] == "kimi_k3" or outer.has("attn_res_block_size")
        return outer, is_k3
    check_choice("model_type", document["model_type"], ("kimi_k3",))
    text = outer.section("text_config")
    check_choice("text_config.model_type", text.get("model_type"), ("kimi_linear", "kimi_k3"))
    outer.refuse_unknown(
        IRRELEVANT
        | {"text_config", "model_type", "quantization_config", "tie_word_embeddings"}
        | {"bos_token_id", "eos_token_id", "pad_token_id"}
    )
    outer.require({"tie_word_embeddings": False})
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
    inherited = {key: document[key] for key in shared if outer.has(key) and not text.has(key)}
    return Settings({**text.values, **inherited}, text.where), True


def optional_int(settings: Settings, key: str) -> int | None:
    return settings.integer(key) if settings.has(key) else None


def _optional_bool(settings: Settings, key: str) -> bool:
    return settings.boolean(key) if settings.has(key) else False


def _layer_kinds(linear: Settings, num_layers: int) -> tuple[LayerKind, ...]:
    """Layer kinds from the two 1-based lists, which must be a partition of 1..num_layers."""
    kinds: dict[int, LayerKind] = {}
    lists: tuple[tuple[str, LayerKind], ...] = (("kda_layers", "kda"), ("full_attn_layers", "mla"))
    for key, kind in lists:
        value = linear.get(key)
        if not isinstance(value, list | tuple):
            raise ConfigError(
                f"{linear.where}{key} is {shown(value)}; it must be a list of layers."
            )
        for number in value:
            check_int(f"An entry of {linear.where}{key}", number, at_least=1, at_most=num_layers)
            if number in kinds:
                raise ConfigError(
                    f"{linear.where}{key} has layer {number} (1-based), which is listed already; "
                    "kda_layers and full_attn_layers must name every layer once."
                )
            kinds[number] = kind
    if len(kinds) < num_layers:
        first = next(number for number in range(1, num_layers + 1) if number not in kinds)
        raise ConfigError(
            f"{linear.where}kda_layers and full_attn_layers name {len(kinds)} of {num_layers} "
            f"layers; layer {first} (1-based) is in neither."
        )
    return tuple(kinds[number] for number in range(1, num_layers + 1))


def _activation(text: Settings) -> Activation:
    kind = text.get("hidden_act")
    if kind == "silu":
        return Activation("silu")
    check_choice(f"{text.where}hidden_act", kind, ("silu", "situ"))
    return Activation(
        "situ",
        beta=text.number("activation_situ_beta", above=0.0),
        linear_beta=text.number("activation_situ_linear_beta", above=0.0),
    )


def _kda(linear: Settings) -> KdaConfig:
    bound = linear.number("gate_lower_bound", below=0.0) if linear.has("gate_lower_bound") else None
    return KdaConfig(
        num_heads=linear.integer("num_heads", at_most=MAX_HEADS),
        head_dim=linear.integer("head_dim"),
        conv_width=linear.integer("short_conv_kernel_size", at_least=2),
        gate_lower_bound=bound,
        is_gate_full_rank=_optional_bool(linear, "use_full_rank_gate"),
    )


def _mla(text: Settings, heads: int, rms_eps: float) -> MlaConfig:
    # Absent is not null here: a checkpoint has to say that it has no query LoRA.
    q_rank = None if text.get("q_lora_rank") is None else text.integer("q_lora_rank")
    return MlaConfig(
        num_heads=heads,
        q_rank=q_rank,
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        v_dim=text.integer("v_head_dim"),
        has_output_gate=_optional_bool(text, "mla_use_output_gate"),
        latent_norm_eps=rms_eps,
    )


def _moe(text: Settings) -> MoeConfig:
    num_experts = text.integer("num_experts", at_most=MAX_EXPERTS)
    latent = optional_int(text, "routed_expert_hidden_size")
    is_quantised = text.has("quantization_config")
    if is_quantised:
        _check_quantisation(text.section("quantization_config"))
        width = "hidden_size" if latent is None else "routed_expert_hidden_size"
        for key in ("moe_intermediate_size", width):
            if text.integer(key) % MXFP4_GROUP:
                raise ConfigError(
                    f"{text.where}{key} is {text.integer(key)}; MXFP4 experts need a multiple of "
                    f"{MXFP4_GROUP}."
                )
    return MoeConfig(
        num_experts=num_experts,
        top_k=text.integer("num_experts_per_token", 1, num_experts),
        expert_width=text.integer("moe_intermediate_size"),
        num_shared=text.integer("num_shared_experts", 0, MAX_EXPERTS),
        latent_width=latent,
        has_latent_norm=latent is not None and _optional_bool(text, "latent_moe_use_norm"),
        is_renormalized=text.boolean("moe_renormalize"),
        routed_scaling=text.number("routed_scaling_factor", above=0.0),
        expert_format="mxfp4" if is_quantised else "bf16",
    )


def _check_quantisation(quantisation: Settings) -> None:
    """Accepts the released scheme and nothing else: MXFP4 weights, activations as they are.

    The names in `ignore` are not interpreted: which tensors are packed is checked tensor by tensor
    when the checkpoint is opened.
    """
    quantisation.require(
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }
    )
    groups = quantisation.section("config_groups")
    if len(groups.values) != 1:
        raise ConfigError(
            f"{groups.where} has the groups {shown(sorted(groups.values))}; exactly one is "
            "supported."
        )
    group = groups.section(next(iter(groups.values)))
    form = group.values.get("format", quantisation.values.get("format"))
    if form != "mxfp4-pack-quantized":
        raise ConfigError(
            f"{group.where}format is {shown(form)}; only 'mxfp4-pack-quantized' is supported."
        )
    group.require({"input_activations": None, "output_activations": None, "targets": ["Linear"]})
    weights = group.section("weights")
    for key in ("num_bits", "type", "group_size"):
        weights.get(key)
    weights.require(
        {
            "num_bits": 4,
            "type": "float",
            "group_size": MXFP4_GROUP,
            "strategy": "group",
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
            "zp_dtype": None,
            "actorder": None,
            "block_structure": None,
        }
    )
