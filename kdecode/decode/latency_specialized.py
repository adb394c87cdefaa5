"""The `latency_specialized` backend: few fused native steps for small decode batches.

A layer is an attention front (mix, norm, projections, core), the output projection with the
residual, and one (dense) or two (mixture of experts) steps for the MLP; a whole plan is one native
call. Opt-in and fail-closed: `refuse` lists every reason why a deployment cannot run it. Rounding
points are those of the ops it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import KeptRows
from kdecode.config import ModelConfig
from kdecode.decode.buffers import (
    allocate,
    input_buffers,
    rotation_buffers,
    row_effects,
    value_buffers,
)
from kdecode.decode.plan import DecodePlan, Step, cannot_run
from kdecode.decode.step_check import StepLimits
from kdecode.decode.traffic import op_weight_bytes
from kdecode.kernels import table
from kdecode.kernels.common.fused import refuse_device
from kdecode.kernels.common.native import MAX_ROWS, NativeStep, Pool, Program
from kdecode.kernels.contract import Buffers, OpContract, PlanMemory, Problem
from kdecode.model.layout import PackedModel
from kdecode.model.stages import layer_stages

# Rows of the plans that can be prepared: one plan each.
ROW_BUCKETS = tuple(range(1, MAX_ROWS + 1))

_COMMIT_NOTE = (
    "KDA slots are only read; kda_commit of {} layers moves them past the rows that stay, in one "
    "native call of its own"
)


class BackendRefusedError(ValueError):
    """The deployment cannot run the backend that was asked for; the message has every reason.

    others: what keeps any backend from running it.
    """

    def __init__(self, reasons: Sequence[str], others: Sequence[str] = ()) -> None:
        self.reasons = (*reasons, *others)
        advice = "Set decode_backend to auto, or change what is named above."
        if others:
            lines = "\n".join(f"  - {reason}" for reason in others)
            advice = f"Nor can any backend:\n{lines}\nChange what is named above."
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        super().__init__(
            f"decode_backend latency_specialized cannot run this deployment:\n{lines}\n{advice}"
        )


@dataclass(frozen=True)
class Deployment:
    """What a deployment's plans have in common.

    isa: instruction set of the native kernels. threads: their pool, owned by the caller; None for
    a deployment that is judged or described, and not run. rotation_scale: of the stack of a draft;
    see `Problem`.
    """

    config: ModelConfig
    device: str
    isa: str
    threads: Pool | None
    cache_dtype: str
    page_tokens: int
    max_context_tokens: int
    rotation_scale: float | None = None

    def problem(self, layer: int | None, rows: int, rows_per_request: int = 1) -> Problem:
        return Problem(
            config=self.config,
            layer=layer,
            rows=rows,
            rows_per_request=rows_per_request,
            device=self.device,
            cache_dtype=self.cache_dtype,
            page_tokens=self.page_tokens,
            max_context_tokens=self.max_context_tokens,
            isa=self.isa,
            rotation_scale=self.rotation_scale,
        )

    @property
    def pool(self) -> Pool:
        if self.threads is None:
            raise ValueError("A plan that runs needs the deployment's threads.")
        return self.threads

    @property
    def max_pages(self) -> int:
        return -(-self.max_context_tokens // self.page_tokens)


def layer_ops(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The fused ops of one layer, in order."""
    attention = "kda_front" if config.layer_kinds[layer] == "kda" else "mla_front"
    if config.mlp_kinds[layer] == "dense":
        return attention, "attn_out", "dense_mlp"
    return attention, "attn_out", "moe_front", "moe_tail"


def refuse(deployment: Deployment, rows_per_request: int = 1) -> list[str]:
    """Every reason, each once, why this deployment cannot run the backend; [] if it can.

    rows_per_request: above 1 for its verify steps.
    """
    config = deployment.config
    reasons = refuse_device(deployment.problem(None, ROW_BUCKETS[-1]))
    attention_widths = {config.kda.width, config.mla.num_heads * config.mla.v_dim}
    if len(attention_widths) > 1:
        reasons.append(
            f"KDA and MLA heads must have the same total width; they have {config.kda.width} and "
            f"{config.mla.num_heads * config.mla.v_dim} channels."
        )
    for op, layer in _distinct_ops(config):
        problem = deployment.problem(layer, ROW_BUCKETS[-1], rows_per_request)
        reasons += table.implementation(op, "cpu").refuse(problem)
    return list(dict.fromkeys(reasons))


def check(deployment: Deployment, rows_per_request: int = 1) -> None:
    """Raises BackendRefusedError with every reason, if there is one."""
    reasons = refuse(deployment, rows_per_request)
    if reasons:
        raise BackendRefusedError(reasons)


def build(
    deployment: Deployment,
    packed: PackedModel,
    caches: Caches,
    rows: int,
    rows_per_request: int = 1,
    memory: PlanMemory | None = None,
) -> DecodePlan:
    """The plan of one row bucket. Raises BackendRefusedError with every reason.

    rows_per_request: above 1 of verify steps, which leave the KDA slots to `DecodePlan.commit`.
    memory: that the plans of one engine share; None for a plan on its own.
    """
    described = describe(deployment, packed, rows, rows_per_request)
    buffers = allocate(described.buffer_specs, memory)
    buffers.caches = caches
    buffers.limits = StepLimits.of(deployment.config, caches, deployment.max_context_tokens)
    buffers.pool = deployment.pool
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
    commit = None
    if rows_per_request > 1:
        commit = _build_commit(deployment, buffers, rows, rows_per_request)
    return replace(
        described, steps=tuple(steps), buffers=buffers, launch=program.run, commit=commit
    )


def describe(
    deployment: Deployment, packed: PackedModel, rows: int, rows_per_request: int = 1
) -> DecodePlan:
    """The plan of one row bucket without what it runs on; ``packed`` may be an outline.

    Raises BackendRefusedError with every reason.
    """
    check(deployment, rows_per_request)
    if rows_per_request < 1 or rows % rows_per_request:
        raise ValueError(f"{rows} rows are not a number of requests of {rows_per_request} each.")
    config = deployment.config
    specs = (*input_buffers(rows, deployment.max_pages), *value_buffers(config, rows))
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
        lines = [(entry.span.slot, entry.span.first, entry.kept) for entry in kept]
        lines += [(0, 0, 0)] * (requests - len(lines))
        buffers["kept_rows"].numpy()[:] = lines
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
    )


def _restrict(
    contract: OpContract, config: ModelConfig, names: frozenset[str], layer: int | None
) -> OpContract:
    """The contract without the stages and buffers that this model or layer does not have.

    No snapshot has been taken before the first layer's mix.
    """
    readable = names - {"snapshots"} if "attn_mix" in contract.covers and layer == 0 else names
    covers = contract.covers
    if layer is not None:
        present = layer_stages(config, layer)
        covers = tuple(stage for stage in covers if stage in present)
    return replace(
        contract,
        covers=covers,
        reads=tuple(name for name in contract.reads if name in readable),
        writes=tuple(name for name in contract.writes if name in names),
    )
