"""Sizes of the shipped model, as a preset of the released layout."""

from __future__ import annotations

from typing import Any

from kdecode.config import ModelConfig
from kdecode.model.draft_synthesis import draft_document as draft_document_for
from kdecode.model.presets import Preset, released_config

TINY = Preset(
    family="kimi_k3",
    hidden=256,
    vocab=6144,
    num_layers=9,
    mla_layers=(3, 7, 8),
    kda_heads=4,
    kda_dim=64,
    mla_heads=4,
    q_rank=128,
    kv_rank=96,
    nope_dim=48,
    rope_dim=16,
    v_dim=64,
    dense_width=768,
    num_experts=24,
    top_k=4,
    expert_width=128,
    num_shared=2,
    latent=128,
    attn_res_block=4,
    max_positions=1_048_576,
)


def model_config() -> ModelConfig:
    return ModelConfig.from_checkpoint(released_config(TINY))


def document() -> dict[str, Any]:
    """The target's ``config.json``."""
    return released_config(TINY)


def draft_document() -> dict[str, Any]:
    """The draft's ``config.json``: the MLA layout that taps the running prefix."""
    return draft_document_for("inferact", model_config())


def generation() -> dict[str, Any]:
    """``generation_config.json``."""
    config = model_config()
    return {
        "bos_token_id": config.bos_id,
        "do_sample": True,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "temperature": 0.7,
        "top_p": 0.95,
    }
