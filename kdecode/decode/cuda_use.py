"""What a step of a CUDA plan is prepared from, and the steps that one rank and several share.

Owns how they are made of a layer's packed weights; `latency_cuda` and `latency_cuda_ranks` have the
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kdecode.config import LayerKind, ModelConfig
from kdecode.decode.streams import MAIN
from kdecode.kernels import table
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.mix_norm import STAGES, Place, mix_norm_of
from kdecode.kernels.contract import OpContract
from kdecode.kernels.mix_norm.op import contract_at
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.model.layout import PackedGqa, PackedKda, PackedLayer, PackedMla, PackedModel
from kdecode.model.rank_share import Exchanged
from kdecode.model.stages import layer_stages

Stages = tuple[tuple[int | None, str], ...]

GQA_OPS = ("gqa_query", "gqa_attend")


@dataclass(frozen=True)
class Use:
    """One launch: what its op is prepared from, and what the plan says of it.

    layer: of the problem. matrices: that one row reads. exchanges: of a step that is an exchange.
    stream, waits_for: of a step beside others, or that waits for one (`side_steps`). config: of the
    problem, where it is not the plan's.
    """

    contract: OpContract
    layer: int | None
    weights: Any
    stages: Stages
    matrices: tuple[Matrix | None, ...] = ()
    # Of matrices that are not `Matrix` objects: a row of the embedding, the chosen experts.
    more_bytes: int = 0
    exchanges: tuple[tuple[Exchanged, ...], ...] = ()
    stream: str = MAIN
    waits_for: tuple[str, ...] = ()
    config: ModelConfig | None = None


def attention(config: ModelConfig, layer: int, entry: PackedLayer) -> Iterator[Use]:
    """From the normed input to what the output projection reads."""
    weights = entry.attention
    if isinstance(weights, PackedKda):
        yield project(layer, "kda_in_proj", weights.in_proj, ("attn_in", "kda_proj"))
        yield layer_use(config, "kda_core", layer, entry, (weights.f_b, weights.g_b))
        return
    if isinstance(weights, PackedGqa):
        yield project(layer, "gqa_in_proj", weights.in_proj, ("attn_in", "gqa_proj"))
        for op in GQA_OPS:
            yield layer_use(config, op, layer, entry, ())
        return
    assert isinstance(weights, PackedMla)
    yield project(layer, "mla_in_proj", weights.in_proj, ("attn_in", "mla_proj"))
    read = {
        "mla_query_up": (weights.q_b,),
        "mla_query": (weights.w_uk,),
        "mla_value": (weights.w_uv,),
    }
    for op in mla_ops(config):
        yield layer_use(config, op, layer, entry, read.get(op, ()))


def core_ops(config: ModelConfig, kind: LayerKind) -> tuple[str, ...]:
    """Between a layer's projection into attention and its output projection."""
    if kind == "gqa":
        return GQA_OPS
    return ("kda_core",) if kind == "kda" else mla_ops(config)


def mla_ops(config: ModelConfig) -> tuple[str, ...]:
    ops = ("mla_query", "mla_attend", "mla_value")
    return ops if config.mla.q_rank is None else ("mla_query_up", *ops)


def mix(packed: PackedModel, place: Place, layer: int | None) -> Use:
    """The mix and norm that a block begins with."""
    owner = packed if layer is None else packed.layers[layer]
    weights = mix_norm_of(packed.config, place, layer, owner)
    stages: Stages = tuple((layer, stage) for stage in STAGES[place])
    return Use(contract=contract_at(place), layer=layer, weights=weights, stages=stages)


def layer_use(
    config: ModelConfig,
    op: str,
    layer: int,
    entry: PackedLayer,
    matrices: tuple[Matrix | None, ...],
) -> Use:
    contract, present = table.contract(op), layer_stages(config, layer)
    stages = tuple((layer, stage) for stage in contract.covers if stage in present)
    return Use(contract, layer, entry, stages, matrices)


def project(
    layer: int | None,
    stage: str,
    matrix: Matrix,
    names: tuple[str, str],
    *,
    is_head: bool = False,
) -> Use:
    contract = replace(table.contract("projection"), reads=names[:1], writes=names[1:])
    weights = ProjectionWeights(matrix, *names, is_head)
    return Use(contract, layer, weights, ((layer, stage),), (matrix,))
