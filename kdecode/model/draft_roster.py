"""Names and shapes of every tensor of a draft's checkpoint, from its configuration.

Owns the published names, of the MLA form and of the GQA forms. A tensor is found by its slot, as in
`model/roster.py`. Holds no data.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdecode.config import GqaConfig, MlaConfig
from kdecode.config_draft import DraftConfig
from kdecode.model.roster import (
    Slots,
    TensorSpec,
    gated_slots,
    matrix,
    mla_slots,
    vector,
)


def draft_slots(config: DraftConfig) -> Slots:
    """Every tensor of the checkpoint; one that may be absent is optional."""
    width, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    is_mla = isinstance(config.attention, MlaConfig)
    slots: Slots = {}
    if is_mla or config.has_embed:
        # The MLA form carries a copy of the target's table, which is the one that is used.
        slots["embed"] = matrix("embed_tokens.weight", vocab, width)._replace(is_optional=is_mla)
    if config.has_head:
        slots["lm_head"] = matrix("lm_head.weight", vocab, width)
    if config.has_tap_norms:
        for place in range(len(config.taps)):
            slots[f"tap_norm.{place}"] = vector(f"fc_norm.{place}.weight", width)
    project, context, final = (
        ("context_proj", "context_norm", "final_norm") if is_mla else ("fc", "hidden_norm", "norm")
    )
    slots["context_proj"] = matrix(f"{project}.weight", width, len(config.taps) * width)
    slots["context_norm"] = vector(f"{context}.weight", width)
    for layer in range(config.num_layers):
        slots |= _layer(config, layer)
    slots["norm"] = vector(f"{final}.weight", width)
    slots["markov_in"] = matrix("markov_head.markov_w1.weight", vocab, rank)
    slots["markov_out"] = matrix("markov_head.markov_w2.weight", vocab, rank)
    if config.has_confidence:
        slots["confidence.proj"] = matrix("confidence_head.proj.weight", 1, width + rank)
        slots["confidence.bias"] = vector("confidence_head.proj.bias", 1)
    return slots


def draft_roster(config: DraftConfig) -> Iterator[TensorSpec]:
    """Every tensor that the published checkpoint of this form has."""
    yield from draft_slots(config).values()


def _layer(config: DraftConfig, layer: int) -> Slots:
    start, width, attention = f"layers.{layer}.", config.hidden_size, config.attention
    name = f"{start}self_attn."
    slots = {
        "input_norm": vector(f"{start}input_layernorm.weight", width),
        "post_norm": vector(f"{start}post_attention_layernorm.weight", width),
    }
    if isinstance(attention, MlaConfig):
        slots |= mla_slots(attention, width, name)
        # A scale of an fp8 cache, which a draft has none of.
        del slots["attention.k_scale"]
    else:
        slots |= _gqa(attention, width, name)
    slots |= gated_slots("mlp", f"{start}mlp.", config.mlp_width, width)
    return {f"layers.{layer}.{slot}": spec for slot, spec in slots.items()}


def _gqa(gqa: GqaConfig, width: int, name: str) -> Slots:
    query, key = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    return {
        "attention.q_proj": matrix(f"{name}q_proj.weight", query, width),
        "attention.k_proj": matrix(f"{name}k_proj.weight", key, width),
        "attention.v_proj": matrix(f"{name}v_proj.weight", key, width),
        "attention.o_proj": matrix(f"{name}o_proj.weight", width, query),
        "attention.q_norm": vector(f"{name}q_norm.weight", gqa.head_dim),
        "attention.k_norm": vector(f"{name}k_norm.weight", gqa.head_dim),
    }
