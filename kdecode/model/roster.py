"""Names, shapes and dtypes of every tensor of a checkpoint, from its configuration.

Owns the released names, together with `weights.py`; they appear nowhere else. One table serves the
reader (what to expect), `synthesis.py` (what to write) and the tests (the totals of the release).
A tensor is found by its slot: the path of its field in `model/parameters.py`, e.g.
``attention.q_proj`` or ``mlp.w1.7.packed``. Holds no data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from kdecode.config import MXFP4_GROUP, KdaConfig, MlaConfig, ModelConfig

# What a K3 checkpoint has besides the language model; skipped by name.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
K3_VISION_TENSORS = 168
K3_VISION_BYTES = 894_717_952

LANGUAGE_PREFIX = "language_model."

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
# K3 pads A_log to a multiple of this.
A_LOG_PADDING = 128

_VECTOR = ("BF16", "F32")
_FLOAT = ("F32", "BF16")


class TensorSpec(NamedTuple):
    """One tensor: the released shape and dtype come first, other accepted ones after it.

    A tuple, because a release has half a million of them.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def dtype(self) -> str:
        return self.dtypes[0]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Slots = dict[str, TensorSpec]


def default_prefix(config: ModelConfig) -> str:
    """What precedes ``model.`` and ``lm_head.`` in the released names."""
    return LANGUAGE_PREFIX if config.model_type == "kimi_k3" else ""


def model_slots(config: ModelConfig, prefix: str) -> Slots:
    """Tensors outside the layers."""
    width, vocab = config.hidden_size, config.vocab_size
    slots = {
        "embed": matrix(f"{prefix}model.embed_tokens.weight", vocab, width),
        "lm_head": matrix(f"{prefix}lm_head.weight", vocab, width),
        "norm": vector(f"{prefix}model.norm.weight", width),
    }
    if config.attn_res_block is not None:
        slots |= _mix("final_mix", f"{prefix}model.output_attn_res", width)
    return slots


def layer_slots(config: ModelConfig, layer: int, prefix: str) -> Slots:
    """Tensors of one layer."""
    start = f"{prefix}model.layers.{layer}."
    width = config.hidden_size
    slots = {
        "input_norm": vector(f"{start}input_layernorm.weight", width),
        "post_norm": vector(f"{start}post_attention_layernorm.weight", width),
    }
    if config.attn_res_block is not None:
        slots |= _mix("attn_mix", f"{start}self_attention_res", width)
        slots |= _mix("mlp_mix", f"{start}mlp_res", width)
    attention = f"{start}self_attn."
    if config.layer_kinds[layer] == "kda":
        slots |= _kda(config.kda, width, attention, is_k3=config.model_type == "kimi_k3")
    else:
        slots |= mla_slots(config.mla, width, attention)
    if config.mlp_kinds[layer] == "dense":
        slots |= gated_slots("mlp", f"{start}mlp.", config.dense_width, width)
    else:
        slots |= _moe(config, f"{start}block_sparse_moe.")
    return slots


def roster(config: ModelConfig, prefix: str | None = None) -> Iterator[TensorSpec]:
    """Every tensor that a checkpoint of the language model has, in the order of the model."""
    prefix = default_prefix(config) if prefix is None else prefix
    outside = model_slots(config, prefix)
    yield outside.pop("embed")
    for layer in range(config.num_layers):
        for spec in layer_slots(config, layer, prefix).values():
            if not spec.is_optional:
                yield spec
    yield from outside.values()


def matrix(name: str, rows: int, cols: int) -> TensorSpec:
    return TensorSpec(name, ((rows, cols),), ("BF16",))


def vector(name: str, size: int, dtypes: tuple[str, ...] = _VECTOR) -> TensorSpec:
    return TensorSpec(name, ((size,),), dtypes)


def _mix(slot: str, name: str, width: int) -> Slots:
    return {
        f"{slot}.norm": vector(f"{name}_norm.weight", width),
        f"{slot}.proj": TensorSpec(f"{name}_proj.weight", ((1, width), (width,)), _VECTOR),
    }


def gated_slots(slot: str, name: str, inner: int, width: int) -> Slots:
    return {
        f"{slot}.gate_proj": matrix(f"{name}gate_proj.weight", inner, width),
        f"{slot}.up_proj": matrix(f"{name}up_proj.weight", inner, width),
        f"{slot}.down_proj": matrix(f"{name}down_proj.weight", width, inner),
    }


def _kda(kda: KdaConfig, width: int, name: str, *, is_k3: bool) -> Slots:
    inner, heads, rank = kda.width, kda.num_heads, kda.head_dim
    slots = {
        f"attention.{part}_proj": matrix(f"{name}{part}_proj.weight", inner, width)
        for part in ("q", "k", "v")
    }
    if kda.is_gate_full_rank:
        slots["attention.g_proj"] = matrix(f"{name}g_proj.weight", inner, width)
    else:
        slots["attention.g_a_proj"] = matrix(f"{name}g_a_proj.weight", rank, width)
        slots["attention.g_b_proj"] = matrix(f"{name}g_b_proj.weight", inner, rank)
    slots["attention.f_a_proj"] = matrix(f"{name}f_a_proj.weight", rank, width)
    slots["attention.f_b_proj"] = matrix(f"{name}f_b_proj.weight", inner, rank)
    slots["attention.b_proj"] = matrix(f"{name}b_proj.weight", heads, width)
    conv_shape = (inner, 1, kda.conv_width)
    for part in ("q", "k", "v"):
        dtypes = _FLOAT if is_k3 else _VECTOR
        slots[f"attention.{part}_conv"] = TensorSpec(
            f"{name}{part}_conv1d.weight", (conv_shape,), dtypes
        )
    padded = -(-heads // A_LOG_PADDING) * A_LOG_PADDING
    a_log_shapes = ((padded,), (heads,)) if is_k3 else ((1, 1, heads, 1), (heads,))
    slots["attention.a_log"] = TensorSpec(f"{name}A_log", a_log_shapes, _FLOAT)
    slots["attention.dt_bias"] = vector(f"{name}dt_bias", inner, _FLOAT)
    slots["attention.o_norm"] = vector(f"{name}o_norm.weight", kda.head_dim, _FLOAT)
    slots["attention.o_proj"] = matrix(f"{name}o_proj.weight", width, inner)
    return slots


def mla_slots(mla: MlaConfig, width: int, name: str) -> Slots:
    heads = mla.num_heads
    query = heads * mla.qk_dim
    slots: Slots = {}
    if mla.q_rank is None:
        slots["attention.q_proj"] = matrix(f"{name}q_proj.weight", query, width)
    else:
        slots["attention.q_a_proj"] = matrix(f"{name}q_a_proj.weight", mla.q_rank, width)
        slots["attention.q_a_norm"] = vector(f"{name}q_a_layernorm.weight", mla.q_rank)
        slots["attention.q_b_proj"] = matrix(f"{name}q_b_proj.weight", query, mla.q_rank)
    slots["attention.kv_a_proj"] = matrix(
        f"{name}kv_a_proj_with_mqa.weight", mla.cache_width, width
    )
    slots["attention.kv_a_norm"] = vector(f"{name}kv_a_layernorm.weight", mla.kv_rank)
    slots["attention.kv_b_proj"] = matrix(
        f"{name}kv_b_proj.weight", heads * (mla.nope_dim + mla.v_dim), mla.kv_rank
    )
    if mla.has_output_gate:
        slots["attention.g_proj"] = matrix(f"{name}g_proj.weight", heads * mla.v_dim, width)
    slots["attention.o_proj"] = matrix(f"{name}o_proj.weight", width, heads * mla.v_dim)
    # The name that quantisers give the scale of an fp8 cache; the releases have none.
    slots["attention.k_scale"] = TensorSpec(f"{name}k_scale", ((), (1,)), _FLOAT, is_optional=True)
    return slots


def _moe(config: ModelConfig, name: str) -> Slots:
    moe, width = config.moe, config.hidden_size
    slots = {
        "mlp.router": matrix(f"{name}gate.weight", moe.num_experts, width),
        "mlp.router_bias": vector(f"{name}gate.e_score_correction_bias", moe.num_experts, _FLOAT),
    }
    model_side = width
    if moe.latent_width is not None:
        model_side = latent = moe.latent_width
        routed = f"{name}routed_expert_"
        slots["mlp.latent_down"] = matrix(f"{routed}down_proj.weight", latent, width)
        if moe.has_latent_norm:
            slots["mlp.latent_norm"] = vector(f"{routed}norm.weight", latent)
        slots["mlp.latent_up"] = matrix(f"{routed}up_proj.weight", width, latent)
    if moe.num_shared:
        slots |= gated_slots("mlp.shared", f"{name}shared_experts.", moe.shared_width, width)
    shapes = {
        "w1": (moe.expert_width, model_side),
        "w3": (moe.expert_width, model_side),
        "w2": (model_side, moe.expert_width),
    }
    for expert in range(moe.num_experts):
        for part, (rows, cols) in shapes.items():
            weight = f"{name}experts.{expert}.{part}.weight"
            slot = f"mlp.{part}.{expert}"
            if moe.expert_format == "bf16":
                slots[slot] = matrix(weight, rows, cols)
                continue
            packed, scale = (rows, cols // 2), (rows, cols // MXFP4_GROUP)
            slots[f"{slot}.packed"] = TensorSpec(f"{weight}_packed", (packed,), ("U8",))
            slots[f"{slot}.scale"] = TensorSpec(f"{weight}_scale", (scale,), ("U8",))
    return slots
