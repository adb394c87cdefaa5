"""A backend's decode step against the reference, one step of its plan at a time.

Owns the walk: each step is given the oracle's inputs, so that what is measured is that step's own
error and not the sum of all before it, and is then compared in every buffer and state it writes, by
the tolerance of its contract. It is the one comparison of plans: `kdecode check` and the tests use
it. Comparing happens on the host, wherever the plan runs. Does not know how plans or caches are
built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.decode import auto
from kdecode.decode.plan import DecodePlan, PlanError, Step
from kdecode.decode.runner import load_inputs
from kdecode.kernels.contract import Tolerance
from kdecode.model.parameters import ModelParameters, MoeParameters
from kdecode.testing.compare import difference, has_same_special

# Two experts whose biased scores differ by less may change places: a sigmoid's slope is at most a
# quarter, and a router logit is a product of bf16 inputs with a relative error of 2^-8 each.
ROUTE_TIE = 4e-3
# Two neighbours of E4M3 are up to an eighth apart, near zero 2^-9.
_FP8_STEP = Tolerance(rtol=0.13, atol=2e-3, rms_ratio=0.05)


@dataclass(frozen=True)
class StepCheck:
    """One buffer or state after one step. ratio: largest error over its bound; 1 is the limit.

    has_same_special: NaN and infinities are in the same places.
    """

    step: int
    op: str
    layer: int | None
    buffer: str
    ratio: float
    rms_ratio: float
    rms_limit: float
    has_same_special: bool = True

    @property
    def is_within(self) -> bool:
        return self.has_same_special and self.ratio <= 1.0 and self.rms_ratio <= self.rms_limit

    def __str__(self) -> str:
        special = "" if self.has_same_special else "NaN or infinities in other places, "
        return (
            f"step {self.step}, {self.op} of layer {self.layer}, {self.buffer}: {special}worst "
            f"error {self.ratio:.3g} times its bound, RMS-error ratio {self.rms_ratio:.3g} of "
            f"{self.rms_limit:.3g}"
        )


def copy_caches(source: Caches, target: Caches) -> None:
    """Gives two caches of one size the same contents; who holds what is not copied."""
    for name in ("conv", "recurrent", "pages"):
        for layer, tensor in getattr(source, name).items():
            getattr(target, name)[layer].copy_(tensor)


def load_step(plan: DecodePlan, batch: StepBatch) -> None:
    """Gives a plan its step without running it. Raises StepError."""
    if plan.rows is not None:
        load_inputs(plan, batch)
    elif plan.backend == "auto":
        auto.load_step(plan, batch)
    else:
        plan.buffers.batch = batch


def check_steps(
    plan: DecodePlan,
    oracle: DecodePlan,
    batch: StepBatch,
    parameters: ModelParameters,
    num_layers: int | None = None,
) -> Iterator[StepCheck]:
    """Runs a step on both plans and yields what was compared, step by step.

    The caches of the two must have equal contents and separate memory; the oracle has one step a
    stage and moves its slots past all rows. Where the plan only reads the slots (a verify step),
    they are moved and compared at the end. num_layers: stop before this layer. An expert choice
    that differs at a tie is no error; see `ROUTE_TIE`.
    """
    load_step(plan, batch)
    load_step(oracle, batch)
    pending = list(oracle.steps)
    moved = {r.slot: len(r.token_ids) for r in batch.requests if r.is_verify}
    count = plan.config.num_layers if num_layers is None else num_layers
    # What steps without a stage have written.
    ahead = set[str]()
    for index, step in enumerate(plan.steps):
        layer = step.layers[0]
        if num_layers is not None and (layer if layer is not None else index) >= num_layers:
            break
        coming = {name for other in pending[: len(step.stages)] for name in other.writes}
        # Of a stage that ends here, by a step before: the oracle has not made it yet.
        made = [name for name in step.reads if name in ahead & coming]
        for name in step.reads:
            if name not in made:
                _give(plan.buffers, oracle.buffers, name)
        step.run()
        written = set[str]()
        for stage in step.stages:
            other = pending.pop(0)
            if other.stages != (stage,):
                raise PlanError(f"The oracle's step {other.op} is not the one stage {stage}.")
            other.run()
            written.update(other.writes)
        for name in (*step.writes, *made):
            # Weights are compared with the experts that they belong to.
            if name in written and name != "route_weights":
                yield _check_buffer(plan, oracle, index, step, name, parameters)
        yield from _check_state(plan, oracle, index, step, batch, has_moved=not moved)
        ahead = ahead - {*made} if step.stages else ahead | {*step.writes}
    plan.buffers.caches.commit(moved)
    for index, step in enumerate(plan.steps if moved else ()):
        layer = step.layers[0]
        if layer is not None and layer < count:
            yield from _check_slots(plan, oracle, index, step, batch)


def _give(target: dict[str, Tensor], source: dict[str, Tensor], name: str) -> None:
    """Writes the oracle's value into a buffer that exists; snapshots as many as there are."""
    if name not in source or name not in target:
        return
    ours, theirs = target[name], source[name]
    if name == "snapshots":
        ours = ours[: theirs.shape[0]]
    ours.copy_(theirs)


def _check_buffer(
    plan: DecodePlan,
    oracle: DecodePlan,
    index: int,
    step: Step,
    name: str,
    parameters: ModelParameters,
) -> StepCheck:
    actual, gold = plan.buffers[name], oracle.buffers[name]
    if name == "route_ids":
        return _check_route(plan, oracle, index, step, parameters)
    if name == "snapshots":
        actual = actual[: gold.shape[0]]
    return _compare(index, step, name, actual, gold, step.tolerance)


def _check_route(
    plan: DecodePlan, oracle: DecodePlan, index: int, step: Step, parameters: ModelParameters
) -> StepCheck:
    """Chosen experts and their weights, where the choice is clear; in order of the experts."""
    layer = step.layers[0]
    assert layer is not None
    moe = parameters.layers[layer].mlp
    assert isinstance(moe, MoeParameters)
    scores = torch.sigmoid(oracle.buffers["mlp_in"].float() @ moe.router.float().T)
    biased = scores + moe.router_bias.float()
    ours, order = plan.buffers["route_ids"].cpu().long().sort(-1)
    theirs, oracle_order = oracle.buffers["route_ids"].long().sort(-1)
    worst = 0.0
    clear = []
    for row in range(ours.shape[0]):
        mine, wanted = set(ours[row].tolist()), set(theirs[row].tolist())
        if mine == wanted and len(mine) == ours.shape[1]:
            clear.append(row)
            continue
        if not all(0 <= expert < biased.shape[1] for expert in mine) or len(mine) < len(wanted):
            worst = float("inf")
            continue
        gap = max(float(biased[row, e]) for e in wanted - mine) - min(
            float(biased[row, e]) for e in mine - wanted
        )
        worst = max(worst, gap / ROUTE_TIE)
    weights = plan.buffers["route_weights"].cpu().gather(-1, order)[clear]
    gold = oracle.buffers["route_weights"].gather(-1, oracle_order)[clear]
    found = _compare(index, step, "route", weights, gold, step.tolerance)
    return StepCheck(
        index,
        step.op,
        layer,
        "route",
        max(found.ratio, worst),
        found.rms_ratio,
        found.rms_limit,
        found.has_same_special,
    )


def _check_state(
    plan: DecodePlan,
    oracle: DecodePlan,
    index: int,
    step: Step,
    batch: StepBatch,
    *,
    has_moved: bool,
) -> Iterator[StepCheck]:
    """The cache rows that a step wrote, and the slots of its requests if it moves them."""
    if has_moved:
        yield from _check_slots(plan, oracle, index, step, batch)
    ours, theirs = plan.buffers.caches, oracle.buffers.caches
    for layer, stage in step.stages:
        if stage == "mla_insert":
            pair = _written(ours, layer, batch), _written(theirs, layer, batch)
            tolerance = step.tolerance
            if ours.cache_dtype == "fp8":
                tolerance = _fp8_tolerance(tolerance, ours.scales[layer])
            yield _compare(index, step, "cache row", *pair, tolerance)


def _fp8_tolerance(before: Tolerance, scale: float) -> Tolerance:
    """Of stored numbers: what the row may be off before it is stored, and one step of E4M3."""
    return Tolerance(
        rtol=before.rtol + _FP8_STEP.rtol,
        atol=before.atol / scale + _FP8_STEP.atol,
        rms_ratio=_FP8_STEP.rms_ratio,
    )


def _check_slots(
    plan: DecodePlan, oracle: DecodePlan, index: int, step: Step, batch: StepBatch
) -> Iterator[StepCheck]:
    """Windows and states of the step's requests."""
    ours, theirs = plan.buffers.caches, oracle.buffers.caches
    slots = [request.slot for request in batch.requests]
    for layer, stage in step.stages:
        if stage == "kda_conv":
            pair = ours.conv[layer][slots], theirs.conv[layer][slots]
            yield _compare(index, step, "conv", *pair, step.tolerance)
        elif stage == "kda_step":
            pair = ours.recurrent[layer][slots], theirs.recurrent[layer][slots]
            yield _compare(index, step, "recurrent", *pair, step.tolerance)


def _written(caches: Caches, layer: int | None, batch: StepBatch) -> Tensor:
    """The rows [T, cache_width] that a step put into a layer's pages."""
    assert layer is not None
    rows = []
    for request in batch.requests:
        for position in range(request.start, request.start + len(request.token_ids)):
            page, place = divmod(position, caches.page_tokens)
            rows.append(caches.pages[layer][request.pages[page], place].float())
    return torch.stack(rows)


def _compare(
    index: int, step: Step, name: str, actual: Tensor, gold: Tensor, tolerance: Tolerance
) -> StepCheck:
    actual = actual.cpu()
    if actual.shape != gold.shape:
        raise PlanError(
            f"{name} after step {index} ({step.op}) is {list(actual.shape)}; the oracle's is "
            f"{list(gold.shape)}."
        )
    found = difference(actual, gold, tolerance)
    return StepCheck(
        index,
        step.op,
        step.layers[0],
        name,
        found.ratio,
        found.rms_ratio,
        tolerance.rms_ratio,
        has_same_special(actual, gold),
    )


def model_state(config: ModelConfig, caches: Caches, request: StepRequest) -> dict[str, Tensor]:
    """Everything that the caches hold of a request, by kind and layer, as fp32.

    conv [W - 1, 3D], recurrent [H, K, V], pages [tokens, cache_width]: of ranks that share the
    positions, those of this one. Call it with a step that has run: its tokens are counted in.
    """
    num_tokens = caches.context.length(request.start + len(request.token_ids))
    state: dict[str, Tensor] = {}
    for layer, kind in enumerate(config.layer_kinds):
        if kind == "kda":
            state[f"conv.{layer}"] = caches.conv[layer][request.slot].float().cpu()
            state[f"recurrent.{layer}"] = caches.recurrent[layer][request.slot].clone().cpu()
        else:
            stored = caches.pages[layer][list(request.pages)].flatten(0, 1)[:num_tokens]
            state[f"pages.{layer}"] = stored.float().cpu() * caches.scales[layer]
    return state
