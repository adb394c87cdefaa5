"""CUDA's steps of `latency_specialized`: a launch each, for one row bucket.

A KDA layer is a projection, its core and the join of its output with the residual; an MLA layer is
a projection, the query, the attention in splits, and the join; then dense (two launches) or a
mixture of experts (four); the mix and norm before each block are a launch. Owns that list and what
each step is prepared from; `latency_specialized` is the entrance, and `gpu_kernels` has the choice
of a step's implementation. Nothing here needs Triton before a plan is judged or built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import KeptRows, kept_lines
from kdecode.config import ModelConfig
from kdecode.decode import gpu_kernels, latency_cuda_ranks, side_steps
from kdecode.decode.buffers import (
    INT32,
    device_buffers,
    input_buffers,
    row_effects,
    turn_buffers,
    value_buffers,
)
from kdecode.decode.cuda_use import Use, attention, core_ops, layer_use, mix, project
from kdecode.decode.deployment import Deployment
from kdecode.decode.plan import Buffer, DecodePlan, Step, cannot_run
from kdecode.decode.side_steps import SideSteps
from kdecode.decode.staging import Staging, stage_inputs
from kdecode.decode.step_check import StepLimits
from kdecode.decode.streams import MAIN
from kdecode.kernels import table
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.mix_norm import STAGES, Place, mix_norm_of
from kdecode.kernels.contract import Buffers, PlanMemory, Prepared, Problem
from kdecode.kernels.embed_norm.op import EmbedWeights
from kdecode.model.layout import PackedMlp, PackedModel

# The oldest architecture that the kernels are compiled and tested for.
OLDEST_ARCH = 90
LAUNCHED_AS = "one CUDA graph"

_COMMIT_NOTE = (
    "KDA slots are only read; kda_commit of {} layers moves them past the rows that stay, in one "
    "launch of its own"
)


def refuse(deployment: Deployment, rows: int, rows_per_request: int) -> list[str]:
    """Reasons of the device and of each op. rows: of the largest plan."""
    reasons = [*_refuse_device(deployment), *gpu_kernels.refuse(deployment)]
    reasons += side_steps.refuse(deployment)
    if find_spec("triton") is None:
        reasons.append(
            "The CUDA plan is made of Triton kernels and Triton is not installed here; install the "
            "extra: pip install 'kdecode[gpu]'."
        )
        return reasons
    if not deployment.context.is_whole:
        reasons.append(
            "The steps of a CUDA plan attend to whole contexts; set decode_context_parallel_size "
            "to 1."
        )
    rows -= rows % rows_per_request
    for op, layer in _distinct_ops(deployment, rows_per_request):
        problem = deployment.problem(layer, rows, rows_per_request)
        reasons += table.implementation(op, "triton").refuse(problem)
    return reasons


def describe(
    deployment: Deployment, packed: PackedModel, rows: int, rows_per_request: int
) -> DecodePlan:
    """The plan of a deployment that is not refused, without what it runs on."""
    config = deployment.config
    specs = (
        *input_buffers(rows, deployment.max_pages),
        *value_buffers(config, rows, deployment.ranks),
        *device_buffers(config, rows),
        *turn_buffers(config, rows, deployment.rotation_scale),
        *latency_cuda_ranks.part_buffers(config, rows, deployment.ranks),
        *latency_cuda_ranks.more_buffers(config, rows, deployment.ranks),
    )
    names = frozenset(spec.name for spec in specs)
    is_verify = rows_per_request > 1 and "kda" in config.layer_kinds
    uses = list(_uses(packed, deployment))
    problems = [_problem(deployment, use, rows, rows_per_request) for use in uses]
    ops = [use.contract.name for use in uses]
    chosen = gpu_kernels.choose(deployment, ops, problems)
    steps = zip(uses, chosen.implementations, strict=True)
    committed = (_COMMIT_NOTE.format(config.layer_kinds.count("kda")),) if is_verify else ()
    return DecodePlan(
        backend="latency_specialized",
        config=config,
        rows=rows,
        rows_per_request=rows_per_request,
        steps=tuple(_describe_step(use, impl, config, names) for use, impl in steps),
        buffer_specs=specs,
        buffers=Buffers(),
        launch=cannot_run,
        launched_as=LAUNCHED_AS,
        notes=(*committed, *chosen.notes, *side_steps.notes(deployment, uses)),
    )


def build(
    deployment: Deployment,
    described: DecodePlan,
    packed: PackedModel,
    caches: Caches,
    memory: PlanMemory | None,
) -> DecodePlan:
    """The plan that was described, on weights and caches; its steps are launched one by one.

    `graph.capture` makes one call of them. `launches` has what they are.
    """
    rows, each = described.rows, described.rows_per_request
    assert rows is not None
    memory = memory or PlanMemory(deployment.place)
    # Parts for other ranks are where their exchange has them.
    moved = latency_cuda_ranks.part_buffers(deployment.config, rows, deployment.ranks)
    specs = tuple(spec for spec in described.buffer_specs if spec not in moved)
    buffers = stage_inputs(specs, memory)
    buffers.caches = caches
    buffers.limits = StepLimits.of(
        deployment.config, caches, deployment.max_context_tokens, deployment.ranks
    )
    if not deployment.ranks.is_alone:
        latency_cuda_ranks.lay_out(deployment, rows, buffers)
    if each > 1:
        buffers.effects = row_effects(deployment.config, rows, memory)
    steps = []
    for step, use in zip(described.steps, _uses(packed, deployment), strict=True):
        problem = _problem(deployment, use, rows, each)
        implementation = table.implementation(step.op, step.impl)
        prepared: Any = implementation.prepare(problem, use.weights, buffers)
        if use.stream != MAIN or use.waits_for:
            prepared = prepared.late()
        steps.append(replace(step, run=prepared.run, prepared=prepared))
    commit = _build_commit(deployment, buffers, rows, each) if each > 1 else None
    return replace(described, steps=tuple(steps), buffers=buffers, launch=None, commit=commit)


def _refuse_device(deployment: Deployment) -> list[str]:
    arch = deployment.arch
    number = arch.removeprefix("sm_")
    if not number.isdigit():
        return [f"The architecture of {deployment.device} is not known; it is given as {arch!r}."]
    if int(number) < OLDEST_ARCH:
        return [
            f"The Triton kernels are made for sm_{OLDEST_ARCH} (Hopper) and later; "
            f"{deployment.device} is {arch}."
        ]
    return []


def _distinct_ops(deployment: Deployment, rows_per_request: int) -> list[tuple[str, int | None]]:
    """Each op of the plans, whatever their rows, with the first layer that uses it."""
    config = deployment.config
    first: dict[str, int | None] = {"embed_norm": 0, "projection": None, "mix_norm": None}
    if not deployment.ranks.is_alone:
        first |= dict.fromkeys(latency_cuda_ranks.OPS)
    first |= dict.fromkeys(side_steps.ops(deployment))
    for layer, kind in enumerate(config.layer_kinds):
        ops = [*core_ops(config, kind), "attn_join"]
        is_dense = config.mlp_kinds[layer] == "dense"
        ops += ["dense_up", "dense_join"] if is_dense else [*_MIXTURE, "moe_join"]
        for op in ops:
            first.setdefault(op, layer)
    if rows_per_request > 1 and "kda" in config.layer_kinds:
        first["kda_commit"] = None
    return list(first.items())


_MIXTURE = ("moe_gate", "expert_up", "expert_down")


def _uses(packed: PackedModel, deployment: Deployment) -> Iterator[Use]:
    """Every step of a plan, in order."""
    if not deployment.ranks.is_alone:
        yield from latency_cuda_ranks.uses(
            packed, deployment.ranks, signals_peers=deployment.signals_peers
        )
        return
    config, sides = packed.config, SideSteps.of(deployment, packed)
    first = mix_norm_of(config, "attn", 0, packed.layers[0])
    yield Use(
        contract=table.contract("embed_norm"),
        layer=0,
        weights=EmbedWeights(packed.embed, first),
        stages=((None, "embed"), *((0, stage) for stage in STAGES["attn"])),
        more_bytes=packed.embed.shape[1] * packed.embed.element_size(),
    )
    for layer, entry in enumerate(packed.layers):
        projected, *core = attention(config, layer, entry)
        yield projected
        yield from sides.before_core(layer)
        yield from core
        yield from _join(sides, layer, "attn_join", (entry.attention.o_proj,))
        yield from _mlp(sides, layer)
    names = ("head_in", "logits")
    yield project(None, "head", packed.head, names, is_head=True)


def _mlp(sides: SideSteps, layer: int) -> Iterator[Use]:
    config, entry = sides.packed.config, sides.packed.layers[layer]
    mlp = entry.mlp
    if isinstance(mlp, PackedMlp):
        yield layer_use(config, "dense_up", layer, entry, (mlp.gate_up,))
        yield from _join(sides, layer, "dense_join", (mlp.down,))
        return
    gate_up = None if mlp.shared is None else mlp.shared.gate_up
    down = None if mlp.shared is None else mlp.shared.down
    yield from sides.before_gate(layer)
    read = (mlp.router, mlp.latent_down, gate_up)
    yield sides.gate(layer_use(config, "moe_gate", layer, entry, read))
    expert, count = mlp.experts[0], config.moe.top_k
    yield layer_use(config, "expert_up", layer, entry, (expert.gate_up,) * count)
    yield layer_use(config, "expert_down", layer, entry, (expert.down,) * count)
    yield from _join(sides, layer, "moe_join", (mlp.latent_up, down))


def _join(
    sides: SideSteps,
    layer: int,
    op: str,
    matrices: tuple[Matrix | None, ...],
) -> Iterator[Use]:
    """The end of a block, then the mix and norm of the next one."""
    config, entry = sides.packed.config, sides.packed.layers[layer]
    yield sides.join(layer_use(config, op, layer, entry, matrices))
    place, owner = _next_block(config, layer, op)
    yield from sides.before_mix(place, owner)
    yield mix(sides.packed, place, owner)


def _problem(deployment: Deployment, use: Use, rows: int, rows_per_request: int) -> Problem:
    problem = deployment.problem(use.layer, rows, rows_per_request)
    return problem if use.config is None else replace(problem, config=use.config)


def _next_block(config: ModelConfig, layer: int, op: str) -> tuple[Place, int | None]:
    if op == "attn_join":
        return "mlp", layer
    return ("attn", layer + 1) if layer + 1 < config.num_layers else ("final", None)


def _describe_step(use: Use, impl: str, config: ModelConfig, names: frozenset[str]) -> Step:
    """A step that is not prepared. names: the plan's buffers."""
    contract, readable, writable = use.contract, names, names
    layers = tuple(layer for layer, _ in use.stages) or (use.layer,)
    if contract.name == "attn_join" and use.layer is not None:
        # No snapshot has been taken before the first layer, and not every layer takes one.
        if config.snapshots_before(use.layer) == 0:
            readable = names - {"snapshots"}
        if not config.is_snapshot_layer(use.layer):
            writable = names - {"snapshots"}
    return Step(
        layers=layers[:1] if len(set(layers)) == 1 else layers,
        covers=tuple(stage for _, stage in use.stages),
        op=contract.name,
        impl=impl,
        reads=tuple(name for name in contract.reads if name in readable),
        writes=tuple(name for name in contract.writes if name in writable),
        run=cannot_run,
        tolerance=contract.tolerance,
        weight_bytes=use.more_bytes + sum(m.num_bytes for m in use.matrices if m is not None),
        exchanges=use.exchanges,
        stream=use.stream,
        waits_for=use.waits_for,
    )


def _build_commit(
    deployment: Deployment, buffers: Buffers, rows: int, rows_per_request: int
) -> Callable[[Sequence[KeptRows]], None]:
    """What moves the slots of a verify step."""
    requests = rows // rows_per_request
    spec = Buffer("kept_rows", (requests, 3), INT32, "input")
    staging = Staging((spec,), buffers.memory, "kept_rows")
    buffers["kept_rows"] = staging.tensors["kept_rows"]
    if not buffers.effects:
        return lambda kept: None
    problem = deployment.problem(None, rows, rows_per_request)
    prepared = table.implementation("kda_commit", "triton").prepare(problem, None, buffers)
    return SlotCommit(staging, prepared, requests)


@dataclass(frozen=True)
class SlotCommit:
    """`DecodePlan.commit`: one launch for all layers. prepared: that launch."""

    staging: Staging
    prepared: Prepared
    requests: int

    def __call__(self, kept: Sequence[KeptRows]) -> None:
        self.staging.arrays()["kept_rows"][:] = kept_lines(kept, self.requests)
        self.staging.send()
        self.prepared.run()


def launches(plan: DecodePlan) -> list[Any]:
    """Every `Launch` of a plan that was built, the commit's included: what a compiler needs."""
    # `TritonStep`s, whose module cannot be imported without Triton, and `CuteStep`s.
    prepared: list[Any] = [step.prepared for step in plan.steps]
    if isinstance(plan.commit, SlotCommit):
        prepared.append(plan.commit.prepared)
    return [launch for entry in prepared for launch in entry.launches]
