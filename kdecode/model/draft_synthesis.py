"""`make-checkpoint --draft`: a draft of seeded random weights, in a published layout.

Owns the four layouts' ``config.json`` for any target: with the published numbers for a target of
the release's size, and in proportion for others. Weights come from `model/synthesis.py`, so their
bytes are the same on every machine; tables that a layout has a copy of are those of the target
of the same preset and seed. A draft of random weights is right about nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from kdecode.config import ModelConfig, check_choice
from kdecode.config_checkpoint import CONFIG_FILE
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.model.building import building
from kdecode.model.draft_roster import draft_slots
from kdecode.model.presets import NUM_SPECIALS, PRESETS, Preset, released_config
from kdecode.model.roster import TensorSpec, default_prefix, model_slots
from kdecode.model.shards import write_shard
from kdecode.model.synthesis import Progress, make_tensor
from kdecode.model.weights import SINGLE_FILE

RELEASED_LAYERS = 93
RELEASED_DRAFT_LAYERS = 5
# Small targets have drafts of fewer layers, so that a draft stays small beside its target.
SMALL_DRAFT_LAYERS = 2
MARKOV_RANK = 256

# As published, 0-based: the layers after which the target is tapped.
_TAPS: dict[str, tuple[int, ...]] = {
    "inferact": (2, 23, 47, 71, 89),
    "lightseek": (7, 31, 47, 63, 87),
    "radixark": (7, 23, 51, 67, 83),
    "redhat": (23, 47, 71, 87, 91),
}
# Places of the mask token among the special tokens.
_MASK_OFFSET = {"inferact": 253, "lightseek": 253, "radixark": 240, "redhat": 253}


def draft_document(kind: DraftKind, target: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a draft for a target."""
    check_choice("draft", kind, get_args(DraftKind))
    if kind in ("inferact", "lightseek"):
        return _mla_document(kind, target)
    return _radixark(target) if kind == "radixark" else _redhat(target)


def make_draft(
    directory: str | Path,
    preset: str | Preset,
    kind: DraftKind,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Writes config.json and one file of tensors; progress(tensors done, of).

    The directory appears whole or not at all. Raises ConfigError for an unknown kind and
    FileExistsError for a directory that has anything in it.
    """
    preset = PRESETS[preset] if isinstance(preset, str) else preset
    target = ModelConfig.from_checkpoint(released_config(preset))
    document = draft_document(kind, target)
    slots = draft_slots(DraftConfig.from_checkpoint(document))
    slot_of = {spec.name: slot for slot, spec in slots.items()}
    header = {spec.name: (spec.dtype, spec.shape) for spec in slots.values()}
    done = 0

    def make(name: str) -> Tensor:
        nonlocal done
        slot = slot_of[name]
        tensor = _make_tensor(target, slot, slots[slot], seed)
        done += 1
        if progress is not None:
            progress(done, len(slots))
        return tensor

    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    with building(directory) as made:
        write_shard(made / SINGLE_FILE, header, make)
        (made / CONFIG_FILE).write_text(text, encoding="utf-8")


def _make_tensor(target: ModelConfig, slot: str, spec: TensorSpec, seed: int) -> Tensor:
    if slot in ("embed", "lm_head"):
        own = model_slots(target, default_prefix(target))[slot]
        return make_tensor(target, slot, own, seed)
    tensor = make_tensor(target, slot, spec, seed)
    if slot == "confidence.bias":
        # Of spread 0.15 about 1 as other vectors are: about 0.
        return tensor - 1
    if slot == "markov_in":
        # Rows of unit RMS: a power of two is exact.
        return tensor * 2.0 ** round((spec.shape[1].bit_length() - 1) / 2)
    return tensor


def _taps(kind: DraftKind, target: ModelConfig) -> list[int]:
    """The published taps, at the same share of the target's depth."""
    layers = target.num_layers
    scaled = {max(0, round((tap + 1) * layers / RELEASED_LAYERS) - 1) for tap in _TAPS[kind]}
    return sorted(scaled)


def _common(kind: DraftKind, target: ModelConfig) -> dict[str, Any]:
    """What every layout states at the top."""
    return {
        "block_size": 8 if kind == "redhat" else 7,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": min(MARKOV_RANK, target.hidden_size // 4),
        "mask_token_id": target.vocab_size - NUM_SPECIALS + _MASK_OFFSET[kind],
    }


def _backbone(target: ModelConfig) -> dict[str, Any]:
    is_released = target.num_layers >= RELEASED_LAYERS
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": RELEASED_DRAFT_LAYERS if is_released else SMALL_DRAFT_LAYERS,
        "rms_norm_eps": target.rms_eps,
        "vocab_size": target.vocab_size,
    }


def _mla_document(kind: DraftKind, target: ModelConfig) -> dict[str, Any]:
    mla, taps = target.mla, _taps(kind, target)
    document = {
        **_common(kind, target),
        **_backbone(target),
        "architectures": ["K3DSparkModel"],
        "kv_lora_rank": mla.kv_rank,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "model_type": "k3_dspark",
        "num_attention_heads": 2 * mla.num_heads // 3,
        "num_target_layers": len(taps),
        "q_lora_rank": mla.q_rank or target.hidden_size // 4,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "rope_parameters": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 32,
            "mscale": 1,
            "mscale_all_dim": 1,
            "original_max_position_embeddings": 32768,
            "rope_theta": 50000,
            "rope_type": "yarn",
        },
        "target_hidden_size": target.hidden_size,
        "target_layer_ids": taps,
        "target_num_hidden_layers": target.num_layers,
        "v_head_dim": mla.v_dim,
    }
    return document | ({"fc_norm": True} if kind == "lightseek" else {})


def _gqa(target: ModelConfig, num_heads: int) -> dict[str, Any]:
    """One key and value head for six heads of the target, where that divides."""
    kv_heads = max(1, target.mla.num_heads // 6)
    return {
        **_backbone(target),
        "head_dim": target.mla.rope_dim,
        "hidden_act": "silu",
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads if num_heads % kv_heads == 0 else 1,
    }


def _radixark(target: ModelConfig) -> dict[str, Any]:
    common = _common("radixark", target)
    block = _gqa(target, 2 * target.mla.num_heads // 3)
    return {
        **common,
        **block,
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {
            "mask_token_id": common.pop("mask_token_id"),
            "target_layer_ids": _taps("radixark", target),
        },
        "layer_types": ["full_attention"] * block["num_hidden_layers"],
        "model_type": "qwen3",
        "num_target_layers": target.num_layers,
        "rope_scaling": {
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "rope_type": "yarn",
        },
        "rope_theta": 50000,
    }


def _redhat(target: ModelConfig) -> dict[str, Any]:
    block = _gqa(target, target.mla.num_heads)
    layer: Mapping[str, Any] = {
        **block,
        "layer_types": ["sliding_attention"] * block["num_hidden_layers"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
        "sliding_window": 2048,
    }
    return {
        **_common("redhat", target),
        "architectures": ["DSparkDraftModel"],
        # Counted as the layers before the tap: one more than the layer it follows.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in _taps("redhat", target)],
        "speculators_model_type": "dspark",
        "transformer_layer_config": dict(layer),
    }
