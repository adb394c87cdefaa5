"""CUDA's plans of a draft: what `latency_cuda` is to the target.

The block of several requests is a plan of the target's own steps. Behind its head stand the choice
of each draft, left to right, and the confidence head where there is one, so that a greedy round is
one run, and recorded one graph. Committed tokens are cached by programs of prepared numbers of
rows. Owns these steps and what they are prepared from; `draft_device` runs them. Nothing here needs
Triton before a plan is judged or built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kdecode.cache.caches import Caches
from kdecode.decode import latency_cuda, latency_specialized
from kdecode.decode.buffers import BF16, draft_buffers, input_buffers, turn_buffers
from kdecode.decode.deployment import Deployment
from kdecode.decode.draft_use import CONTEXT_ROWS
from kdecode.decode.plan import Buffer, DecodePlan, Step, cannot_run
from kdecode.decode.staging import stage_inputs
from kdecode.kernels import table
from kdecode.kernels.common.native import MAX_ROWS
from kdecode.kernels.contract import Buffers, PlanMemory, Problem
from kdecode.kernels.draft_choice.op import ChoiceWeights
from kdecode.model.draft_tiles import DraftPlanWeights
from kdecode.model.layout import PackedModel

_NOTES = (
    "greedy drafts are chosen where their logits are; others by the host, with a replay for each",
    "committed tokens: draft_context and draft_insert of {} layers in one graph, at most {} rows",
)


def most_requests(num_drafts: int) -> int:
    """Requests of the largest block."""
    return MAX_ROWS // num_drafts


def refuse(deployment: Deployment, num_drafts: int) -> list[str]:
    """Reasons of the ops that the target's plans do not have. deployment: the draft's own."""
    problem = deployment.problem(0, most_requests(num_drafts) * num_drafts, num_drafts)
    reasons = []
    for op in ("draft_context", "draft_insert", "draft_choice", "draft_confidence"):
        reasons += table.implementation(op, "triton").refuse(problem)
    return reasons


def describe(
    deployment: Deployment,
    weights: DraftPlanWeights,
    target: PackedModel,
    requests: int,
    num_drafts: int,
) -> DecodePlan:
    """The plan of a block of so many requests, without what it runs on.

    deployment: the draft's own. weights and target may be outlines. Raises BackendRefusedError.
    """
    rows, model = requests * num_drafts, weights.model(target)
    plan = latency_specialized.describe(deployment, model, rows, num_drafts)
    more = draft_buffers(
        model.config.vocab_size,
        requests,
        num_drafts,
        has_confidence=weights.confidence is not None,
    )
    steps = tuple(_step(use, None) for use in _uses(weights, num_drafts))
    choices, committed = _NOTES
    return replace(
        plan,
        steps=(*plan.steps, *steps),
        buffer_specs=(*plan.buffer_specs, *more),
        notes=(*plan.notes, choices, committed.format(len(weights.layers), CONTEXT_ROWS[0])),
    )


def build(
    deployment: Deployment,
    weights: DraftPlanWeights,
    target: PackedModel,
    caches: Caches,
    requests: int,
    num_drafts: int,
    memory: PlanMemory | None = None,
) -> DecodePlan:
    """The same on weights and caches, launched one by one. caches: the draft's rows as pages.

    memory: that the programs of one draft share; None for a plan on its own.
    """
    described = describe(deployment, weights, target, requests, num_drafts)
    uses = list(_uses(weights, num_drafts))
    stack = replace(described, steps=described.steps[: -len(uses)])
    plan = latency_cuda.build(deployment, stack, weights.model(target), caches, memory)
    problem = deployment.problem(None, requests * num_drafts, num_drafts)
    steps = [_prepared(use, None, problem, plan.buffers) for use in uses]
    # The stack has no layer that keeps a state.
    return replace(plan, steps=(*plan.steps, *steps), commit=None)


def num_choices(plan: DecodePlan) -> int:
    """Steps of a block's plan behind its head: a choice a draft, and the confidence."""
    return sum(step.op in ("draft_choice", "draft_confidence") for step in plan.steps)


@dataclass(frozen=True)
class ContextProgram:
    """Caches the rows of so many committed tokens in every layer. run: all of its steps."""

    buffers: Buffers
    steps: tuple[Step, ...]
    run: Callable[[], None]


def build_context(
    deployment: Deployment,
    weights: DraftPlanWeights,
    caches: Caches,
    rows: int,
    memory: PlanMemory | None = None,
) -> ContextProgram:
    """deployment: the draft's own; caches: its rows as pages; memory: as `build` has it."""
    width = deployment.config.hidden_size
    inputs = input_buffers(rows, deployment.max_pages)
    specs = (
        *(spec for spec in inputs if spec.name in ("row_position", "row_pages")),
        *turn_buffers(deployment.config, rows, deployment.rotation_scale),
        Buffer("taps", (rows, weights.context_proj.cols // width, width), BF16),
        Buffer("context", (rows, width), BF16),
    )
    memory = memory or PlanMemory(deployment.place)
    buffers = stage_inputs(specs, memory, "draft_context_inputs")
    buffers.caches = caches
    use = _Use("draft_context", weights, weights.context_proj.num_bytes)
    steps = [_prepared(use, None, deployment.problem(None, rows), buffers)]
    cached = deployment.config.gqa or deployment.config.mla
    size = cached.cache_width * width * BF16.itemsize
    for layer, entry in enumerate(weights.layers):
        use = _Use("draft_insert", entry, size)
        steps.append(_prepared(use, layer, deployment.problem(layer, rows), buffers))

    def run() -> None:
        for step in steps:
            step.run()

    return ContextProgram(buffers, tuple(steps), run)


@dataclass(frozen=True)
class _Use:
    """What a step that covers no stage is prepared from, and the bytes of weights that it reads."""

    op: str
    weights: Any
    weight_bytes: int


def _uses(weights: DraftPlanWeights, num_drafts: int) -> Iterator[_Use]:
    """What stands behind the head, in order."""
    matrix = weights.markov_out
    for place in range(num_drafts):
        choice = ChoiceWeights(weights.markov_in, matrix, place)
        yield _Use("draft_choice", choice, matrix.num_bytes + matrix.cols * BF16.itemsize)
    if weights.confidence is not None:
        head, _ = weights.confidence
        yield _Use("draft_confidence", weights, head.numel() * head.element_size())


def _step(use: _Use, layer: int | None) -> Step:
    """A step that is not prepared."""
    contract = table.contract(use.op)
    return Step(
        layers=(layer,),
        covers=(),
        op=use.op,
        impl="triton",
        reads=contract.reads,
        writes=contract.writes,
        run=cannot_run,
        tolerance=contract.tolerance,
        weight_bytes=use.weight_bytes,
    )


def _prepared(use: _Use, layer: int | None, problem: Problem, buffers: Buffers) -> Step:
    implementation = table.implementation(use.op, "triton")
    prepared = implementation.prepare(problem, use.weights, buffers)
    return replace(_step(use, layer), run=prepared.run, prepared=prepared)
