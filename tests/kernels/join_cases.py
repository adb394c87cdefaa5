"""Uses of the projections, joins and ends of a CUDA plan for chains of `triton_cases`, with tiles.

Tests take tiles of many columns, because Triton's interpreter runs one program after another, and
of few input columns, so that there are several of them, the last not full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triton_cases import Case, Chain, Use

from kdecode.kernels.common.cute_tiles import CuteTile
from kdecode.kernels.common.mix_norm import STAGES, MixNorm, Place, mix_norm_of
from kdecode.kernels.common.tile_table import forced, recording
from kdecode.kernels.mix_norm.op import contract_at
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.kernels.table import contract
from kdecode.model.stages import layer_stages

# The MLP of layer 0 is dense; snapshots are pushed before layers 0, 2 and 4.
LAYERS = (0, 1, 2, 3)
# Of each projection.
PROJECTIONS = {"kda_in_proj": 1, "mla_in_proj": 3, "head": None}


def chain(case: Case, uses: Sequence[Use], rows: int, each: int = 1, **tile: int) -> Chain:
    """A chain whose products have these tiles."""
    sizes = {"block_n": 64, "block_k": 64, **tile}
    with recording() as asked:
        Chain(case, uses, rows, each)
    with forced({key: replace(default, **sizes) for key, default in asked.items()}):
        return Chain(case, uses, rows, each)


def cute_chain(
    case: Case, use: Use, rows: int, each: int = 1, tile: CuteTile | None = None
) -> Chain:
    """An op in CuTe DSL, with its own tile or with this one."""
    with recording() as asked:
        made = Chain(case, [use], rows, each, impl="cute")
    if tile is None:
        return made
    with forced(dict.fromkeys(asked, tile)):
        return Chain(case, [use], rows, each, impl="cute")


def projection_use(case: Case, stage: str) -> Use:
    layer = PROJECTIONS[stage]
    if layer is None:
        names, matrix = ("head_in", "logits"), case.packed.head
    else:
        names = ("attn_in", stage.removesuffix("_in_proj") + "_proj")
        matrix = case.packed.layers[layer].attention.in_proj
    weights = ProjectionWeights(matrix, *names, is_head=layer is None)
    return Use("projection", layer, weights, ((layer, stage),), names[:1], names[1:])


def join_use(case: Case, op: str, layer: int) -> Use:
    """A join of a layer. What it does not push it may not lose either."""
    config, made = case.config, contract(op)
    is_push = op == "attn_join" and config.is_snapshot_layer(layer)
    has_snapshots = config.snapshots_before(layer if op == "attn_join" else layer + 1) > 0
    present = layer_stages(config, layer)
    return Use(
        op,
        layer,
        stages=tuple((layer, stage) for stage in made.covers if stage in present),
        reads=(*made.reads, *(("snapshots",) if has_snapshots else ())),
        writes=tuple(name for name in made.writes if is_push or name != "snapshots"),
    )


def mix_norm_use(case: Case, place: Place, layer: int) -> Use:
    """The mix and norm behind a join of this layer."""
    then, next_layer = _then(case, place, layer)
    made = contract_at(place)
    stages = tuple((next_layer, stage) for stage in STAGES[place])
    reads = made.reads if then.num_snapshots else ("prefix",)
    return Use("mix_norm", next_layer, then, stages, reads, made.writes)


def _then(case: Case, place: Place, layer: int) -> tuple[MixNorm, int | None]:
    config, packed = case.config, case.packed
    if place == "final":
        return mix_norm_of(config, place, None, packed), None
    next_layer = layer + 1 if place == "attn" else layer
    owner: Any = packed.layers[next_layer]
    return mix_norm_of(config, place, next_layer, owner), next_layer
