"""Bytes that the stages of a decode step have to move: weights, state and cache.

Owns the accounting behind `kdecode plan` and the bandwidth floor. Weights are counted once a step,
as they are packed; a step of several rows reads each distinct expert once, so its expert bytes
depend on the routing and are given for one row.
"""

from __future__ import annotations

from kdecode.config import ModelConfig
from kdecode.kernels.common.matrix import Matrix
from kdecode.model.layout import (
    PackedGqa,
    PackedKda,
    PackedMla,
    PackedMlp,
    PackedModel,
    PackedMoe,
)


def stage_weight_bytes(packed: PackedModel, layer: int | None, stage: str) -> int:
    """Packed weight bytes that one row reads in a stage; 0 for stages without a matrix."""
    if layer is None:
        if stage == "head":
            return packed.head.num_bytes
        return packed.embed.shape[1] * packed.embed.element_size() if stage == "embed" else 0
    entry = packed.layers[layer]
    if isinstance(entry.attention, PackedKda):
        matrices = _kda_matrices(entry.attention, stage)
    elif isinstance(entry.attention, PackedGqa):
        matrices = _gqa_matrices(entry.attention, stage)
    else:
        matrices = _mla_matrices(entry.attention, stage)
    if isinstance(entry.mlp, PackedMlp):
        matrices += _mlp_matrices(entry.mlp) if stage == "dense_mlp" else ()
    else:
        matrices += _moe_matrices(entry.mlp, stage, packed.config)
    return sum(matrix.num_bytes for matrix in matrices if matrix is not None)


def op_weight_bytes(
    packed: PackedModel, layer: int | None, op: str, covers: tuple[str, ...]
) -> int:
    """Packed weight bytes that one row reads in a step of an op that covers these stages.

    The two halves of a mixture of experts share a stage: `moe_front` reads the shared expert's
    gate_up matrix already, and `moe_tail`, which completes the stage, covers it.
    """
    total = sum(stage_weight_bytes(packed, layer, stage) for stage in covers)
    if layer is None or op not in ("moe_front", "moe_tail"):
        return total
    moe = packed.layers[layer].mlp
    if not isinstance(moe, PackedMoe) or moe.shared is None:
        return total
    early = moe.shared.gate_up.num_bytes
    return total + early if op == "moe_front" else total - early


def runs_experts(op: str, covers: tuple[str, ...]) -> bool:
    """Whether a step reads routed experts: on CUDA the stage has a first step without a stage."""
    return "experts" in covers or op == "expert_up"


def expert_bytes(packed: PackedModel, layer: int, op: str = "experts") -> int:
    """Packed bytes that a step reads of one routed expert of a layer; 0 where there are none."""
    mlp = packed.layers[layer].mlp
    if not isinstance(mlp, PackedMoe):
        return 0
    gate_up, down = (matrix.num_bytes for matrix in _mlp_matrices(mlp.experts[0]))
    return {"expert_up": gate_up, "expert_down": down}.get(op, gate_up + down)


def stage_state_bytes(
    config: ModelConfig, layer: int | None, stage: str, context_tokens: int, cache_bytes: int
) -> int:
    """State and cache bytes that one row reads and writes in a stage.

    context_tokens: tokens in the cache, this row's included. cache_bytes: bytes of a cached number.
    """
    if layer is None:
        return 0
    kda, mla = config.kda, config.mla
    if stage == "kda_conv":
        return 2 * (kda.conv_width - 1) * 3 * kda.width * 2
    if stage == "kda_step":
        return 2 * kda.width * kda.head_dim * 4
    if stage == "mla_insert":
        return mla.cache_width * cache_bytes
    if stage == "mla_attend":
        return context_tokens * mla.cache_width * cache_bytes
    if config.gqa is not None and stage == "gqa_insert":
        return config.gqa.cache_width * cache_bytes
    if config.gqa is not None and stage == "gqa_attend":
        return context_tokens * config.gqa.cache_width * cache_bytes
    return 0


def verify_state_bytes(
    config: ModelConfig,
    layer: int | None,
    stage: str,
    context_tokens: int,
    cache_bytes: int,
    rows: int,
) -> int:
    """State and cache bytes that a request of so many rows reads and writes in a verify step.

    Its rows share the reading of slot and cache. context_tokens: with the first of them. The slots
    are not written; see `commit_bytes`.
    """
    one = stage_state_bytes(config, layer, stage, context_tokens + rows - 1, cache_bytes)
    if stage in ("kda_conv", "kda_step"):
        return one // 2
    return one * rows if stage in ("mla_insert", "gqa_insert") else one


def commit_bytes(config: ModelConfig, kept: int) -> int:
    """Bytes that moving one request's slots past so many rows reads and writes, in all layers."""
    kda = config.kda
    slot = sum(stage_state_bytes(config, 0, stage, 0, 0) for stage in ("kda_conv", "kda_step"))
    effects = kept * kda.width * (3 * 4 + 3 * 2)
    return config.layer_kinds.count("kda") * (slot + effects)


def _kda_matrices(kda: PackedKda, stage: str) -> tuple[Matrix | None, ...]:
    return {
        "kda_in_proj": (kda.in_proj,),
        "kda_gate": (kda.f_b,),
        "kda_out_norm": (kda.g_b,),
        "attn_out_proj": (kda.o_proj,),
    }.get(stage, ())


def _mla_matrices(mla: PackedMla, stage: str) -> tuple[Matrix | None, ...]:
    return {
        "mla_in_proj": (mla.in_proj,),
        "mla_query": (mla.q_b, mla.w_uk),
        "mla_value": (mla.w_uv,),
        "attn_out_proj": (mla.o_proj,),
    }.get(stage, ())


def _gqa_matrices(gqa: PackedGqa, stage: str) -> tuple[Matrix | None, ...]:
    return {"gqa_in_proj": (gqa.in_proj,), "attn_out_proj": (gqa.o_proj,)}.get(stage, ())


def _mlp_matrices(mlp: PackedMlp) -> tuple[Matrix, ...]:
    return mlp.gate_up, mlp.down


def _moe_matrices(moe: PackedMoe, stage: str, config: ModelConfig) -> tuple[Matrix | None, ...]:
    if stage == "experts":
        return _mlp_matrices(moe.experts[0]) * config.moe.top_k
    if stage == "shared_mlp":
        return () if moe.shared is None else _mlp_matrices(moe.shared)
    return {
        "route": (moe.router,),
        "latent_down": (moe.latent_down,),
        "latent_up": (moe.latent_up,),
    }.get(stage, ())
