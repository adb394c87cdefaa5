"""The plan as data: what validate refuses, and what run_until and explain do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.decode import all_reference
from kdecode.decode.plan import DecodePlan, PlanError, Step
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear

PAGE_TOKENS = 4


def _plan(config: ModelConfig) -> DecodePlan:
    caches = Caches.allocate(config, "cpu", 2, 4, PAGE_TOKENS)
    parameters = random_parameters(config, seed=3)
    plan = all_reference.build(parameters, config, caches, page_tokens=PAGE_TOKENS)
    request = StepRequest((5, 6, 7), start=0, slot=1, pages=(2,), is_decode=False)
    plan.buffers.batch = StepBatch((request,))
    return plan


@pytest.mark.parametrize("config", [tiny_k3(), tiny_linear()], ids=["k3", "linear"])
def test_the_reference_plan_covers_the_model(config: ModelConfig) -> None:
    plan = _plan(config)
    plan.run()
    assert plan.buffers["logits"].shape == (1, config.vocab_size)


def _without(index: int) -> Callable[[tuple[Step, ...]], tuple[Step, ...]]:
    return lambda steps: steps[:index] + steps[index + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(4), "stage 4 of the plan is layer 0 kda_gate"),
        (lambda steps: steps[:-1], "ends before head"),
        (lambda steps: (*steps, steps[-1]), "covers head twice"),
        (lambda steps: (steps[1], steps[0], *steps[2:]), "expected embed"),
        (
            lambda steps: (replace(steps[0], writes=()), *steps[1:]),
            "reads prefix before any step wrote it",
        ),
        (
            lambda steps: (replace(steps[0], reads=("nowhere",)), *steps[1:]),
            "undeclared buffer nowhere",
        ),
    ],
)
def test_validate_refuses(
    change: Callable[[tuple[Step, ...]], tuple[Step, ...]], message: str
) -> None:
    plan = _plan(tiny_k3())
    with pytest.raises(PlanError, match=message):
        replace(plan, steps=change(plan.steps))


def test_run_until_stops_after_the_step() -> None:
    plan = _plan(tiny_k3())
    plan.run_until(2)
    assert "attn_in" in plan.buffers
    assert "kda_proj" not in plan.buffers


def test_explain_has_a_line_for_every_step() -> None:
    plan = _plan(tiny_k3())
    lines = plan.explain().splitlines()
    assert len(lines) == len(plan.steps) + 3
    assert "all_reference" in lines[0]
    assert lines[-1] == f"{len(plan.steps)} steps"


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    plan = _plan(tiny_k3())
    request = StepRequest((plan.config.vocab_size,), 0, 0, (0,), is_decode=False)
    plan.buffers.batch = StepBatch((request,))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        plan.run()
    assert not torch.isnan(plan.buffers.caches.recurrent[0]).any()
