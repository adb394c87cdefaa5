"""A draft's released ``config.json`` as a `DraftConfig`: the MLA form and the two GQA forms.

Owns how the published layouts differ, so that nothing else asks who published a draft: every
difference is a field. Layers of the target count from 0, and a tap is taken after its layer. No
torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kdecode.config import (
    ConfigError,
    GqaConfig,
    MlaConfig,
    ModelConfig,
    check_choice,
    check_int,
)
from kdecode.config_checkpoint import (
    IRRELEVANT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    Settings,
    read_json,
    words,
)
from kdecode.config_json import shown

# What a tap hands over: the running prefix, or what the next layer's residual mix would read.
TapStream = Literal["prefix", "attn_res"]
# Who published a layout; only what writes one asks.
DraftKind = Literal["inferact", "lightseek", "radixark", "redhat"]

_HEADS = words(
    """
    block_size confidence_head_with_markov dflash_config draft_vocab_size enable_confidence_head
    fc_norm is_causal markov_head_type markov_rank mask_token_id mla_use_nope mla_use_output_gate
    num_target_layers rope_scaling speculators_model_type target_hidden_size target_layer_ids
    aux_hidden_state_layer_ids target_num_hidden_layers transformer_layer_config
    """
)
_BACKBONE = words(
    """
    attention_bias head_dim hidden_act hidden_size intermediate_size kv_lora_rank layer_types
    max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads
    num_hidden_layers num_key_value_heads q_lora_rank qk_nope_head_dim qk_rope_head_dim
    rms_norm_eps rope_scaling sliding_window use_sliding_window v_head_dim vocab_size
    """
)
# Training, and descriptions of how the draft was made.
_TRAINING = words(
    """
    ce_loss_alpha confidence_head_alpha l1_loss_alpha loss_decay_gamma num_anchors
    speculators_config speculators_version tie_word_embeddings
    """
)
_KNOWN = _HEADS | _BACKBONE | _TRAINING | IRRELEVANT
_FIXED = {
    "attention_bias": False,
    "confidence_head_with_markov": True,
    "hidden_act": "silu",
    "markov_head_type": "vanilla",
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "mlp_bias": False,
    "speculators_model_type": "dspark",
    "tie_word_embeddings": False,
}
_DFLASH = words("causal mask_token_id target_layer_ids block_size")
_ROPE = words(
    """
    attention_factor beta_fast beta_slow factor mscale mscale_all_dim
    original_max_position_embeddings rope_theta rope_type type
    """
)
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of ``dim`` channels by position; pairs are (2i, 2i + 1), or (i, i + dim / 2).

    factor above 1 is YaRN: frequencies that turn less than beta_slow times within
    original_positions are divided by it, those above beta_fast are kept, between them is a ramp.
    amplitude multiplies cosine and sine; score_scale the softmax scale.
    """

    dim: int
    theta: float
    is_interleaved: bool
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    score_scale: float = 1.0


@dataclass(frozen=True)
class DraftConfig:
    """Everything the maths of one draft needs.

    taps: layers of the target, ascending. is_causal: a row of the block sees the rows up to itself,
    and all of them otherwise. window: a round sees the context from its anchor's position minus so
    many; None for all of it. max_drafts: as trained. has_embed, has_head: own tables that the draft
    runs with, instead of the target's.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    mlp_width: int
    rms_eps: float
    attention: MlaConfig | GqaConfig
    rope: RopeConfig
    taps: tuple[int, ...]
    tap_stream: TapStream
    has_tap_norms: bool
    is_causal: bool
    window: int | None
    max_drafts: int
    mask_id: int
    markov_rank: int
    has_confidence: bool
    has_embed: bool
    has_head: bool

    @property
    def cache_width(self) -> int:
        """Numbers of a layer's cache row: latent and rotated key, or all keys and values."""
        return self.attention.cache_width

    @classmethod
    def from_checkpoint(
        cls, source: str | Path | Mapping[str, Any], tap_stream: TapStream | None = None
    ) -> DraftConfig:
        """A draft's ``config.json``: the file, its directory, or its decoded content.

        tap_stream: None for what the published draft of this layout was trained on; no file says
        it, and the wrong one shows in nothing but a lower acceptance.
        """
        document = source if isinstance(source, Mapping) else read_json(Path(source))
        return _parse(Settings(document), tap_stream)

    def check_target(self, target: ModelConfig) -> None:
        """Raises ConfigError unless this draft can follow the target."""
        for name, own, other in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if own != other:
                raise ConfigError(f"{name} of the draft is {own}; the target has {other}.")
        if self.taps[-1] >= target.num_layers:
            raise ConfigError(
                f"The draft taps the target after layer {self.taps[-1]}; the last layer is "
                f"{target.num_layers - 1}."
            )


def _parse(top: Settings, tap_stream: TapStream | None) -> DraftConfig:
    top.refuse_unknown(_KNOWN)
    top.require(_FIXED)
    is_nested = top.has("transformer_layer_config")
    body = top.section("transformer_layer_config") if is_nested else top
    body.refuse_unknown(_KNOWN)
    body.require(_FIXED)
    is_mla = body.has("kv_lora_rank")
    dflash = top.section("dflash_config") if top.has("dflash_config") else Settings({})
    dflash.refuse_unknown(_DFLASH)
    if not is_mla and not is_nested and not dflash.values:
        raise ConfigError(
            "The draft's configuration has none of kv_lora_rank, dflash_config and "
            "transformer_layer_config; it is none of the known layouts."
        )
    hidden = body.integer("hidden_size")
    vocab = body.integer("vocab_size", at_most=MAX_VOCABULARY)
    top.require({"target_hidden_size": hidden, "draft_vocab_size": vocab})
    eps = body.number("rms_norm_eps", above=0.0, below=1.0)
    has_tap_norms = top.has("fc_norm") and top.boolean("fc_norm")
    is_sliding = False if is_mla else _is_sliding(body)
    if tap_stream is None:
        tap_stream = "prefix" if is_nested or (is_mla and not has_tap_norms) else "attn_res"
    check_choice("tap_stream", tap_stream, get_args(TapStream))
    heads = dflash if dflash.has("mask_token_id") else top
    attention = _mla(body, eps) if is_mla else _gqa(body)
    return DraftConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        num_layers=body.integer("num_hidden_layers", at_most=MAX_LAYERS),
        mlp_width=body.integer("intermediate_size"),
        rms_eps=eps,
        attention=attention,
        rope=_rope(body, attention),
        taps=_taps(top, dflash, is_nested=is_nested, is_mla=is_mla),
        tap_stream=tap_stream,
        has_tap_norms=has_tap_norms,
        is_causal=_is_causal(top, dflash, is_sliding),
        window=body.integer("sliding_window", at_most=MAX_POSITIONS) if is_sliding else None,
        max_drafts=(dflash if dflash.has("block_size") else top).integer("block_size"),
        mask_id=heads.integer("mask_token_id", 0, vocab - 1),
        markov_rank=top.integer("markov_rank"),
        has_confidence=top.has("enable_confidence_head") and top.boolean("enable_confidence_head"),
        has_embed=is_nested,
        has_head=is_nested,
    )


def _taps(top: Settings, dflash: Settings, *, is_nested: bool, is_mla: bool) -> tuple[int, ...]:
    """0-based layers. The nested form counts the layers before the tap: one more."""
    where, key, shift = top, "target_layer_ids", 0
    if is_nested:
        key, shift = "aux_hidden_state_layer_ids", 1
    elif dflash.has(key):
        where = dflash
    value = where.get(key)
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{where.where}{key} is {shown(value)}; it must be a list of layers.")
    name = f"An entry of {where.where}{key}"
    taps = tuple(check_int(name, layer, at_least=shift) - shift for layer in value)
    if any(later <= layer for layer, later in itertools.pairwise(taps)):
        raise ConfigError(f"{where.where}{key} is {shown(list(value))}; the layers must ascend.")
    # The MLA form states the number of taps; the others the layers of the target under that name.
    if is_mla:
        top.require({"num_target_layers": len(taps)})
    return taps


def _is_sliding(body: Settings) -> bool:
    kinds = body.get("layer_types") if body.has("layer_types") else ["full_attention"]
    if not isinstance(kinds, list | tuple) or not kinds or any(k != kinds[0] for k in kinds):
        raise ConfigError(
            f"{body.where}layer_types is {shown(kinds)}; all layers of a draft must be of one type."
        )
    check_choice(f"An entry of {body.where}layer_types", kinds[0], _LAYER_TYPES)
    return bool(kinds[0] == "sliding_attention")


def _is_causal(top: Settings, dflash: Settings, is_sliding: bool) -> bool:
    if top.has("is_causal"):
        return top.boolean("is_causal")
    if dflash.has("causal"):
        return dflash.boolean("causal")
    return is_sliding


def _mla(body: Settings, eps: float) -> MlaConfig:
    return MlaConfig(
        num_heads=body.integer("num_attention_heads", at_most=MAX_HEADS),
        q_rank=body.integer("q_lora_rank"),
        kv_rank=body.integer("kv_lora_rank"),
        nope_dim=body.integer("qk_nope_head_dim"),
        rope_dim=body.integer("qk_rope_head_dim"),
        v_dim=body.integer("v_head_dim"),
        has_output_gate=False,
        latent_norm_eps=eps,
    )


def _gqa(body: Settings) -> GqaConfig:
    heads = body.integer("num_attention_heads", at_most=MAX_HEADS)
    kv_heads = body.integer("num_key_value_heads", at_most=MAX_HEADS)
    if heads % kv_heads:
        raise ConfigError(
            f"{body.where}num_attention_heads is {heads}; it must be a multiple of "
            f"num_key_value_heads, which is {kv_heads}."
        )
    return GqaConfig(heads, kv_heads, body.integer("head_dim"))


def _rope(body: Settings, attention: MlaConfig | GqaConfig) -> RopeConfig:
    is_mla = isinstance(attention, MlaConfig)
    dim = attention.rope_dim if isinstance(attention, MlaConfig) else attention.head_dim
    if dim % 2:
        raise ConfigError(f"{dim} channels are to be rotated in pairs; the number must be even.")
    # Two names for one thing: newer files have rope_parameters, older ones rope_scaling.
    key = "rope_parameters" if body.has("rope_parameters") else "rope_scaling"
    rope = body.section(key) if body.has(key) else Settings({}, f"{body.where}{key}.")
    rope.refuse_unknown(_ROPE)
    theta = (rope if rope.has("rope_theta") else body).number("rope_theta", above=1.0)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    check_choice(f"{rope.where}rope_type", kind, ("default", "yarn"))
    if kind == "default":
        return RopeConfig(dim, theta, is_interleaved=is_mla)
    factor = rope.number("factor", above=1.0)

    def optional(name: str, otherwise: float) -> float:
        return rope.number(name, above=0.0) if rope.has(name) else otherwise

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    amplitude, score_scale = magnitude(1.0), 1.0
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        shared = magnitude(rope.number("mscale_all_dim", above=0.0))
        amplitude = magnitude(rope.number("mscale", above=0.0)) / shared
        # As MLA models have it, the scores carry what cosine and sine do not.
        score_scale = shared**2 if is_mla else 1.0
    return RopeConfig(
        dim,
        theta,
        is_interleaved=is_mla,
        factor=factor,
        original_positions=rope.integer("original_max_position_embeddings", at_most=MAX_POSITIONS),
        beta_fast=optional("beta_fast", 32.0),
        beta_slow=optional("beta_slow", 1.0),
        amplitude=optional("attention_factor", amplitude),
        score_scale=score_scale,
    )
