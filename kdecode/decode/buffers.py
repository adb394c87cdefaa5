"""The named buffers of a forward step, as ARCHITECTURE.md lists them: shapes, dtypes, memory."""

from __future__ import annotations

import torch

from kdecode.config import GqaConfig, ModelConfig
from kdecode.decode.plan import Buffer
from kdecode.kernels.common.expert_squares import num_squares
from kdecode.kernels.common.mla_splits import max_splits
from kdecode.kernels.common.step import RowEffects
from kdecode.kernels.contract import Buffers, PlanMemory
from kdecode.parallel.ranks import ALONE, Ranks

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

_Names = dict[str, tuple[tuple[int | str, ...], torch.dtype]]


def input_buffers(rows: int, max_pages: int) -> tuple[Buffer, ...]:
    """Metadata of a static plan, written before each run: one line of each a row."""
    return (
        Buffer("row_token", (rows,), INT32, "input"),
        Buffer("row_slot", (rows,), INT32, "input"),
        Buffer("row_position", (rows,), INT32, "input"),
        Buffer("row_pages", (rows, max_pages), INT32, "input"),
    )


def rotation_buffers(rows: int, rope_dim: int) -> tuple[Buffer, ...]:
    """More metadata where attention is rotated: what each row sees, and how it turns."""
    return Buffer("row_context", (rows,), INT32, "input"), _turn(rows, rope_dim)


def turn_buffers(
    config: ModelConfig, rows: int, rotation_scale: float | None
) -> tuple[Buffer, ...]:
    """Of a CUDA plan how each row turns; nothing where none does."""
    return () if rotation_scale is None else (_turn(rows, config.rotated_dim),)


def _turn(rows: int, rope_dim: int) -> Buffer:
    """The cosines, then the sines, of each row's pairs of rotated channels."""
    return Buffer("row_rotation", (rows, rope_dim), FP32, "input")


def draft_buffers(
    vocab: int, requests: int, drafts: int, *, has_confidence: bool
) -> tuple[Buffer, ...]:
    """More of a CUDA plan of a draft's block. draft_tokens: the anchors, then a line a draft."""
    buffers = (
        Buffer("draft_tokens", (drafts + 1, requests), INT32, "input"),
        Buffer("draft_logits", (requests, vocab), FP32),
    )
    if not has_confidence:
        return buffers
    return *buffers, Buffer("draft_confidence", (requests * drafts,), FP32)


def value_buffers(config: ModelConfig, rows: int | str, ranks: Ranks = ALONE) -> tuple[Buffer, ...]:
    """Every value that a stage writes. rows: a number, or "T" for a plan of any number of rows.

    config: of one of ``ranks``, each of which gets the logits of the whole vocabulary.
    """
    width = config.hidden_size
    names: _Names = {
        "prefix": ((rows, width), BF16),
        "attn_mix": ((rows, width), BF16),
        "attn_in": ((rows, width), BF16),
        "attn_delta": ((rows, width), BF16),
        "mlp_mix": ((rows, width), BF16),
        "mlp_in": ((rows, width), BF16),
        "mlp_delta": ((rows, width), BF16),
        "final_mix": ((rows, width), BF16),
        "head_in": ((rows, width), BF16),
        "logits": ((rows, config.vocab_size * ranks.size), FP32),
        "attn_out": ((rows, config.kda.width), BF16),
    }
    if config.attn_res_block is not None:
        names["snapshots"] = ((config.num_snapshots, rows, width), BF16)
    if "kda" in config.layer_kinds:
        names |= _kda_buffers(config, rows)
    if "mla" in config.layer_kinds:
        names |= _mla_buffers(config, rows)
    if config.gqa is not None:
        names |= _gqa_buffers(config.gqa, rows)
    if "moe" in config.mlp_kinds:
        names |= _moe_buffers(config, rows)
    return tuple(Buffer(name, shape, dtype) for name, (shape, dtype) in names.items())


def device_buffers(config: ModelConfig, rows: int) -> tuple[Buffer, ...]:
    """More values of a CUDA plan, whose steps end inside of a stage."""
    mla, moe = config.mla, config.moe
    names: _Names = {}
    if "mla" in config.layer_kinds and mla.q_rank is not None:
        names["mla_q"] = ((rows, mla.num_heads * mla.qk_dim), BF16)
    if "mla" in config.layer_kinds:
        splits = (rows, max_splits(rows), mla.num_heads)
        names["mla_split_sums"] = ((*splits, mla.kv_rank), FP32)
        names["mla_split_stats"] = ((*splits, 2), FP32)
    if "moe" in config.mlp_kinds:
        names["expert_product"] = ((rows, moe.top_k, moe.expert_width), BF16)
        if blocks := num_squares(config, rows):
            names["expert_squares"] = ((blocks, rows), FP32)
    if "dense" in config.mlp_kinds:
        names["dense_product"] = ((rows, config.dense_width), BF16)
    return tuple(Buffer(name, shape, dtype) for name, (shape, dtype) in names.items())


def allocate(specs: tuple[Buffer, ...], memory: PlanMemory | None) -> Buffers:
    """The buffers of a static plan. memory: that it shares with others; None for its own."""
    buffers = Buffers(memory=memory)
    for spec in specs:
        shape = [int(size) for size in spec.shape]
        buffers[spec.name] = buffers.memory.take(spec.name, shape, spec.dtype)
    return buffers


def row_effects(config: ModelConfig, rows: int, memory: PlanMemory) -> dict[int, RowEffects]:
    """Where the rows of a verify step are recorded, by KDA layer."""
    kda = config.kda
    heads = (rows, kda.num_heads, kda.head_dim)

    def take(layer: int, name: str) -> torch.Tensor:
        return memory.take(f"effects.{layer}.{name}", heads, FP32)

    return {
        layer: RowEffects(
            keys=take(layer, "keys"),
            decays=take(layer, "decays"),
            corrections=take(layer, "corrections"),
            samples=memory.take(f"effects.{layer}.samples", (rows, 3 * kda.width), BF16),
        )
        for layer, kind in enumerate(config.layer_kinds)
        if kind == "kda"
    }


def _kda_buffers(config: ModelConfig, rows: int | str) -> _Names:
    kda = config.kda
    # The ranks of f_a and of a low-rank output gate are the head width in every released model.
    gate = kda.width if kda.is_gate_full_rank else kda.head_dim
    columns = 3 * kda.width + gate + kda.head_dim + kda.num_heads
    return {
        "kda_proj": ((rows, columns), BF16),
        "kda_qkv": ((rows, 3 * kda.width), BF16),
        "kda_decay": ((rows, kda.num_heads, kda.head_dim), FP32),
        "kda_beta": ((rows, kda.num_heads), FP32),
        "kda_out": ((rows, kda.num_heads, kda.head_dim), BF16),
    }


def _mla_buffers(config: ModelConfig, rows: int | str) -> _Names:
    mla = config.mla
    query = mla.num_heads * mla.qk_dim if mla.q_rank is None else mla.q_rank
    gate = mla.num_heads * mla.v_dim if mla.has_output_gate else 0
    return {
        "mla_proj": ((rows, query + mla.cache_width + gate), BF16),
        "mla_query": ((rows, mla.num_heads, mla.cache_width), BF16),
        "mla_latent": ((rows, mla.num_heads, mla.kv_rank), BF16),
    }


def _gqa_buffers(gqa: GqaConfig, rows: int | str) -> _Names:
    heads = gqa.num_heads
    return {
        "gqa_proj": ((rows, heads * gqa.head_dim + gqa.cache_width), BF16),
        "gqa_query": ((rows, heads, gqa.head_dim), BF16),
    }


def _moe_buffers(config: ModelConfig, rows: int | str) -> _Names:
    moe = config.moe
    names: _Names = {
        "route_ids": ((rows, moe.top_k), INT32),
        "route_weights": ((rows, moe.top_k), FP32),
        "expert_sum": ((rows, moe.latent_width or config.hidden_size), BF16),
    }
    if moe.num_shared:
        names["shared"] = ((rows, config.hidden_size), BF16)
        # Between the two fused steps of a mixture; the standard forward has no use for it.
        names["shared_product"] = ((rows, moe.shared_width), BF16)
    if moe.latent_width is not None:
        names["latent"] = ((rows, moe.latent_width), BF16)
        names["routed"] = ((rows, config.hidden_size), BF16)
    return names
