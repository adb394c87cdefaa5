"""The CPU's steps of `latency_specialized`: few fused native steps, a whole plan one native call.

A layer is an attention front (mix, norm, projections, core), the output projection with the
residual, and one (dense) or two (mixture of experts) steps for the MLP. Owns that list and its
programs; `latency_specialized` is the entrance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import KeptRows, kept_lines
from kdecode.config import ModelConfig
from kdecode.decode.buffers import (
    allocate,
    input_buffers,
    rotation_buffers,
    row_effects,
    value_buffers,
)
from kdecode.decode.deployment import BackendRefusedError, Deployment
from kdecode.decode.plan import DecodePlan, Step, cannot_run
from kdecode.decode.shared_run import SharedRun, most_exchanged, step_exchanges
from kdecode.decode.step_check import StepLimits
from kdecode.decode.traffic import op_weight_bytes
from kdecode.kernels import table
from kdecode.kernels.common.fused import MAX_RANKS, refuse_device
from kdecode.kernels.common.native import NativeStep, Program
from kdecode.kernels.contract import Buffers, OpContract, PlanMemory
from kdecode.model.layout import PackedModel
from kdecode.model.rank_share import Exchanged
from kdecode.model.stages import layer_stages

_NO_SHARED = (
    "Native steps exchange values through memory that all ranks share; ranks on several hosts have "
    "none."
)
_COMMIT_NOTE = (
    "KDA slots are only read; kda_commit of {} layers moves them past the rows that stay, in one "
    "native call of its own"
)


def refuse(deployment: Deployment, rows: int, rows_per_request: int) -> list[str]:
    """Reasons of the device and of each op. rows: of the largest plan."""
    reasons = refuse_device(deployment.problem(None, rows))
    if deployment.ranks.size > MAX_RANKS:
        reasons.append(
            f"Native steps exchange values among up to {MAX_RANKS} ranks; there are "
            f"{deployment.ranks.size}."
        )
    for op, layer in _distinct_ops(deployment.config):
        problem = deployment.problem(layer, rows, rows_per_request)
        reasons += table.implementation(op, "cpu").refuse(problem)
    return reasons


def describe(
    deployment: Deployment, packed: PackedModel, rows: int, rows_per_request: int
) -> DecodePlan:
    """The plan of a deployment that is not refused, without what it runs on."""
    config = deployment.config
    values = value_buffers(config, rows, deployment.ranks)
    specs = (*input_buffers(rows, deployment.max_pages), *values)
    if deployment.rotation_scale is not None:
        specs += rotation_buffers(rows, config.mla.rope_dim)
    ops: list[tuple[str, int | None]] = [("embed", None)]
    for layer in range(config.num_layers):
        ops += [(op, layer) for op in layer_ops(config, layer)]
    ops.append(("head", None))
    names = frozenset(spec.name for spec in specs)
    is_verify = rows_per_request > 1 and "kda" in config.layer_kinds
    return DecodePlan(
        backend="latency_specialized",
        config=config,
        rows=rows,
        rows_per_request=rows_per_request,
        steps=tuple(_describe_step(deployment, packed, names, op, layer) for op, layer in ops),
        buffer_specs=specs,
        buffers=Buffers(),
        launch=cannot_run,
        notes=(_COMMIT_NOTE.format(config.layer_kinds.count("kda")),) if is_verify else (),
    )


def build(
    deployment: Deployment,
    described: DecodePlan,
    packed: PackedModel,
    caches: Caches,
    memory: PlanMemory | None,
) -> DecodePlan:
    """The plan that was described, on weights and caches. Raises BackendRefusedError for ranks that
    have no memory in common."""
    if not deployment.ranks.is_alone and deployment.shared is None:
        raise BackendRefusedError([_NO_SHARED])
    rows, rows_per_request = described.rows, described.rows_per_request
    assert rows is not None
    buffers = allocate(described.buffer_specs, memory)
    buffers.caches = caches
    buffers.limits = StepLimits.of(
        deployment.config, caches, deployment.max_context_tokens, deployment.ranks
    )
    buffers.pool = deployment.pool
    buffers.shared = deployment.shared
    if rows_per_request > 1:
        buffers.effects = row_effects(deployment.config, rows, buffers.memory)
    program = Program(deployment.pool, deployment.isa)
    steps = []
    for step in described.steps:
        layer = step.layers[0]
        weights: Any = packed if layer is None else packed.layers[layer]
        prepared = table.implementation(step.op, "cpu").prepare(
            deployment.problem(layer, rows, rows_per_request), weights, buffers
        )
        assert isinstance(prepared, NativeStep)
        program.add(prepared.name, prepared.args)
        steps.append(replace(step, run=prepared.run))
    launch: Callable[[int, int], None] = program.run
    if not deployment.ranks.is_alone:
        launch = SharedRun(deployment.shared, program.run, tuple(steps))
        steps = [
            replace(step, run=partial(launch, index, index + 1)) for index, step in enumerate(steps)
        ]
    commit = None
    if rows_per_request > 1:
        commit = _build_commit(deployment, buffers, rows, rows_per_request)
    return replace(described, steps=tuple(steps), buffers=buffers, launch=launch, commit=commit)


def exchange_bytes(
    config: ModelConfig, size: int, rows: int, *, shares_context: bool = False
) -> int:
    """Bytes of the largest part that a rank gives in one exchange of a plan of so many rows.

    config: of one rank's share. shares_context: whether each has some of a request's positions.
    """
    exchanges: list[tuple[Exchanged, ...]] = []
    for op, layer in _distinct_ops(config):
        covers = _covers(op, config, layer)
        exchanges += step_exchanges(config, size, op, covers, shares_context=shares_context)
    return most_exchanged(exchanges, rows)


def layer_ops(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The fused ops of one layer, in order."""
    attention = "kda_front" if config.layer_kinds[layer] == "kda" else "mla_front"
    if config.mlp_kinds[layer] == "dense":
        return attention, "attn_out", "dense_mlp"
    return attention, "attn_out", "moe_front", "moe_tail"


def _distinct_ops(config: ModelConfig) -> list[tuple[str, int | None]]:
    """Each op of the plan with the first layer that uses it."""
    first: dict[str, int | None] = {"embed": None, "head": None}
    for layer in range(config.num_layers):
        for op in layer_ops(config, layer):
            first.setdefault(op, layer)
    return list(first.items())


def _build_commit(
    deployment: Deployment, buffers: Buffers, rows: int, rows_per_request: int
) -> Callable[[Sequence[KeptRows]], None]:
    """The program that moves the slots of a verify step, all layers in one call."""
    requests = rows // rows_per_request
    buffers["kept_rows"] = torch.zeros(requests, 3, dtype=torch.int32)
    program = Program(deployment.pool, deployment.isa)
    prepared = [
        table.implementation("kda_commit", "cpu").prepare(
            deployment.problem(layer, rows, rows_per_request), None, buffers
        )
        for layer in buffers.effects
    ]
    for step in prepared:
        assert isinstance(step, NativeStep)
        program.add(step.name, step.args)

    def commit(kept: Sequence[KeptRows]) -> None:
        buffers["kept_rows"].numpy()[:] = kept_lines(kept, requests)
        program.run(0, len(prepared))

    return commit


def _describe_step(
    deployment: Deployment, packed: PackedModel, names: frozenset[str], op: str, layer: int | None
) -> Step:
    """A step that is not prepared. names: the plan's buffers."""
    contract = _restrict(table.contract(op), deployment.config, names, layer)
    return Step(
        layers=(layer,),
        covers=contract.covers,
        op=op,
        impl=f"cpu/{deployment.isa}",
        reads=contract.reads,
        writes=contract.writes,
        run=cannot_run,
        tolerance=contract.tolerance,
        weight_bytes=op_weight_bytes(packed, layer, op, contract.covers),
        exchanges=step_exchanges(
            deployment.config,
            deployment.ranks.size,
            op,
            contract.covers,
            shares_context=not deployment.context.is_whole,
        ),
    )


def _restrict(
    contract: OpContract, config: ModelConfig, names: frozenset[str], layer: int | None
) -> OpContract:
    """The contract without the stages and buffers that this model or layer does not have.

    No snapshot has been taken before the first layer's mix.
    """
    readable = names - {"snapshots"} if "attn_mix" in contract.covers and layer == 0 else names
    return replace(
        contract,
        covers=_covers(contract.name, config, layer),
        reads=tuple(name for name in contract.reads if name in readable),
        writes=tuple(name for name in contract.writes if name in names),
    )


def _covers(op: str, config: ModelConfig, layer: int | None) -> tuple[str, ...]:
    """The stages of an op that this layer has."""
    covers = table.contract(op).covers
    if layer is None:
        return covers
    present = layer_stages(config, layer)
    return tuple(stage for stage in covers if stage in present)
