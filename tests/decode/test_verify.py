"""The comparison of two plans finds what is wrong, names it, and lets ties be ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from auto_cases import PAGE_TOKENS, Model, Session, make_model, tokens_of

from kdecode.cache.batch import StepBatch
from kdecode.decode import all_reference
from kdecode.decode.plan import DecodePlan
from kdecode.decode.verify import ROUTE_TIE, StepCheck, check_steps, copy_caches
from kdecode.model.parameters import MoeParameters
from kdecode.testing.cases import tiny_k3

Damage = Callable[[DecodePlan, StepBatch], None]


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model("k3")


def _outside(model: Model, op: str = "", damage: Damage | None = None) -> list[StepCheck]:
    """What a decode step of two rows has outside its bounds if the first ``op`` is followed by
    ``damage``."""
    session, other = Session(model), Session(model)
    requests = session.start(), session.start()
    session.run((requests[0], tokens_of(20, seed=1)), (requests[1], tokens_of(9, seed=2)))
    copy_caches(session.caches, other.caches)
    oracle = all_reference.build(
        model.parameters, model.config, other.caches, page_tokens=PAGE_TOKENS
    )
    for request in requests:
        request.is_decode = True
    batch = StepBatch(tuple(request.take([7]) for request in requests))
    plan, steps = session.plan, list(session.plan.steps)
    if damage is not None:
        index = next(i for i, step in enumerate(steps) if step.op == op)
        original = steps[index].run

        def run() -> None:
            original()
            damage(plan, batch)

        steps[index] = replace(steps[index], run=run)
    damaged = replace(plan, steps=tuple(steps))
    return [
        check
        for check in check_steps(damaged, oracle, batch, model.parameters)
        if not check.is_within
    ]


def test_a_sound_plan_is_within(model: Model) -> None:
    assert _outside(model) == []


def _scale_beta(plan: DecodePlan, batch: StepBatch) -> None:
    plan.buffers["kda_beta"].mul_(1.5)


def _nan_in_beta(plan: DecodePlan, batch: StepBatch) -> None:
    plan.buffers["kda_beta"][0, 0] = float("nan")


def _infinite_beta(plan: DecodePlan, batch: StepBatch) -> None:
    plan.buffers["kda_beta"][0, 0] = float("inf")


def _stale_window(plan: DecodePlan, batch: StepBatch) -> None:
    first = min(plan.buffers.caches.conv)
    plan.buffers.caches.conv[first][batch.requests[1].slot] = 0.5


def _wrong_state(plan: DecodePlan, batch: StepBatch) -> None:
    first = min(plan.buffers.caches.recurrent)
    plan.buffers.caches.recurrent[first][batch.requests[1].slot].mul_(1.05)


def _wrong_row(plan: DecodePlan, batch: StepBatch) -> None:
    first, request = min(plan.buffers.caches.pages), batch.requests[0]
    page, place = divmod(request.start, PAGE_TOKENS)
    plan.buffers.caches.pages[first][request.pages[page], place].mul_(1.1)


def _one_expert_twice(plan: DecodePlan, batch: StepBatch) -> None:
    plan.buffers["route_ids"][0, 1] = plan.buffers["route_ids"][0, 0]


def _no_such_expert(plan: DecodePlan, batch: StepBatch) -> None:
    plan.buffers["route_ids"][0, 1] = 10_000


def _unscaled_weights(plan: DecodePlan, batch: StepBatch) -> None:
    plan.buffers["route_weights"].mul_(1.1)


@pytest.mark.parametrize(
    ("op", "damage", "buffer"),
    [
        ("kda_gate", _scale_beta, "kda_beta"),
        ("kda_gate", _nan_in_beta, "kda_beta"),
        ("kda_gate", _infinite_beta, "kda_beta"),
        ("kda_conv", _stale_window, "conv"),
        ("kda_recurrence", _wrong_state, "recurrent"),
        ("mla_attention", _wrong_row, "cache row"),
        ("route", _one_expert_twice, "route"),
        ("route", _no_such_expert, "route"),
        ("route", _unscaled_weights, "route"),
    ],
)
def test_damage_is_found_where_it_is_and_nowhere_else(
    model: Model, op: str, damage: Damage, buffer: str
) -> None:
    """Each step has the oracle's inputs, so one wrong step makes no other step wrong."""
    (found,) = _outside(model, op, damage)
    assert (found.op, found.buffer) == (op, buffer)
    assert f"{op} of layer {found.layer}, {buffer}" in str(found)


@pytest.mark.parametrize(("margin", "is_within"), [(0.5, True), (2.0, False)])
def test_an_expert_may_change_at_a_tie_only(margin: float, is_within: bool) -> None:
    """The last chosen expert and the best one left, ``margin`` tie widths apart, change places."""
    last_rank = tiny_k3().moe.top_k - 1

    def tie(moe: MoeParameters) -> MoeParameters:
        """Equal scores: what decides is the bias."""
        ranked, bias = moe.router_bias.argsort(descending=True), moe.router_bias.clone()
        bias[ranked[last_rank + 1]] = bias[ranked[last_rank]] - margin * ROUTE_TIE
        return replace(moe, router=torch.zeros_like(moe.router), router_bias=bias)

    model = make_model("k3", change_moe=tie)
    first = next(p.mlp for p in model.parameters.layers if isinstance(p.mlp, MoeParameters))
    last, spare = first.router_bias.argsort(descending=True)[last_rank : last_rank + 2]

    def swap(plan: DecodePlan, batch: StepBatch) -> None:
        ids = plan.buffers["route_ids"]
        assert int((ids == last).sum()) == 2
        ids[ids == last] = int(spare)

    assert [check.buffer for check in _outside(model, "route", swap)] == (
        [] if is_within else ["route"]
    )
