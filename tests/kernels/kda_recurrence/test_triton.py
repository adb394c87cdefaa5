"""The delta rule in Triton, in chunks and for one token, against the recurrence in fp64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_cases as cases
from delta_rule_cases import assert_near, delta_rule_inputs, recurrence
from torch import Tensor

from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.contract import Buffers
from kdecode.kernels.kda_commit.move import move
from kdecode.kernels.kda_recurrence import torch_impl, triton_chunk, triton_impl
from kdecode.kernels.kda_recurrence.op import CONTRACT
from kdecode.kernels.kda_recurrence.triton_chunk import Span, delta_rule_chunks
from kdecode.testing.cases import tiny_k3
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poison_, poisoned

HEADS = 2
# Both factors of a product are exact to 2^-16; the state's own sums to less.
BOUND = 3e-5


def inputs_of(tokens: int, decay: str, width: int, seed: int = 0) -> tuple[Span, Tensor, Tensor]:
    """Rows on the device, and what the recurrence makes of them: outputs and state, fp64."""
    qkv, g, beta, state = delta_rule_inputs(tokens, decay, heads=HEADS, width=width, seed=seed)
    qkv = qkv.to(torch.bfloat16)
    q, k, v = qkv.double().unbind(1)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * width**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    out, moved = recurrence(q, k, v, g, beta, state)
    on_device = [x.to(cases.DEVICE) for x in (qkv, g, beta, state)]
    target = poisoned((tokens, HEADS, width), torch.bfloat16).to(cases.DEVICE)
    return Span(*on_device, target), out, moved


@pytest.mark.parametrize(
    ("tokens", "decay", "width"),
    [
        (2, "bounded", 16),
        (16, "strong", 16),
        (64, "weak", 48),
        (65, "bounded", 32),
        (98, "strong", 16),
        (70, "trained", 16),
    ],
)
def test_chunks_equal_the_recurrence(tokens, decay, width):
    rows, out, moved = inputs_of(tokens, decay, width)
    lower_bound = -5.0 if decay in ("bounded", "weak") else None
    assert delta_rule_chunks(rows, lower_bound, "sm_90") is None
    assert_near(rows.state.cpu(), moved, "state", BOUND)
    assert_near(rows.out.cpu(), out, "out", 2.5e-3)


def test_a_long_prompt_is_run_in_segments(monkeypatch):
    monkeypatch.setattr(triton_chunk, "SEGMENT", 32)
    rows, out, moved = inputs_of(70, "bounded", 16)
    delta_rule_chunks(rows, -5.0, "sm_90")
    assert_near(rows.state.cpu(), moved, "state", BOUND)
    assert_near(rows.out.cpu(), out, "out", 2.5e-3)


@pytest.mark.parametrize(("tokens", "decay"), [(8, "bounded"), (20, "trained")])
def test_verified_rows_are_recorded(tokens, decay):
    rows, out, moved = inputs_of(tokens, decay, 16)
    before = rows.state.clone()
    lower_bound = -5.0 if decay == "bounded" else None
    recorded = delta_rule_chunks(rows, lower_bound, "sm_90", is_verify=True)
    bit_equal(rows.state.cpu(), before.cpu(), "state")
    assert_near(rows.out.cpu(), out, "out", 2.5e-3)
    state = before.double()
    keys, corrections = recorded.keys.double(), recorded.corrections.double()
    for t in range(tokens):
        state = rows.decay[t].double().exp().unsqueeze(-1) * state
        state += keys[t].unsqueeze(-1) * corrections[t].unsqueeze(-2)
    assert_near(state.cpu(), moved, "state", BOUND)


class Step:
    """A mixed step of the standard path: its buffers, for one implementation."""

    def __init__(self, module, spans, width, lower_bound):
        config = tiny_k3()
        kda = replace(config.kda, num_heads=HEADS, head_dim=width, gate_lower_bound=lower_bound)
        config = replace(config, kda=kda)
        rows, device = spans[-1].last, cases.DEVICE
        decay = "trained" if lower_bound is None else "bounded"
        qkv, g, beta, _ = delta_rule_inputs(rows, decay, heads=HEADS, width=width, seed=3)
        proj = torch.randn(rows, 4 * HEADS * width, generator=torch.Generator().manual_seed(4))
        self.buffers = Buffers(
            kda_qkv=qkv.flatten(1).to(device, torch.bfloat16),
            kda_decay=g.to(device),
            kda_beta=beta.to(device),
            kda_proj=proj.to(device, torch.bfloat16),
        )
        self.states = poisoned((6, HEADS, width, width), torch.float32).to(device)
        for span in spans:
            generator = torch.Generator().manual_seed(span.slot)
            self.states[span.slot] = torch.randn(HEADS, width, width, generator=generator)
        self.buffers.caches = SimpleNamespace(recurrent={1: self.states})
        self.buffers.effects = {}
        single = tuple(span for span in spans if span.num_rows == 1)

        def index(numbers):
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        self.buffers.step = SimpleNamespace(
            single=single,
            multi=tuple(span for span in spans if span.num_rows > 1),
            single_rows=index([span.first for span in single]),
            single_slots=index([span.slot for span in single]),
        )
        problem = replace(cases_problem(config), layer=1)
        assert module.refuse(problem) == []
        self.run = module.prepare(problem, None, self.buffers).run


def cases_problem(config):
    return cases.Case(config, None, None).problem(1, 1)


def span_of(first, last, slot, is_verify=False):
    return RequestSpan(first, last, 0, slot, torch.empty(0), None, is_verify)


@pytest.mark.parametrize(
    ("spans", "width", "lower_bound"),
    [
        ([span_of(0, 1, 4)], 16, -5.0),
        ([span_of(0, 1, 4), span_of(1, 2, 0), span_of(2, 3, 5)], 48, None),
        ([span_of(0, 1, 4), span_of(1, 4, 0, True), span_of(4, 5, 2), span_of(5, 25, 1)], 16, -5.0),
    ],
)
def test_a_step_equals_that_of_torch(spans, width, lower_bound):
    ours = Step(triton_impl, spans, width, lower_bound)
    theirs = Step(torch_impl, spans, width, lower_bound)
    theirs.buffers.products = SimpleNamespace(isa=None)
    before = ours.states.clone()
    for step in (ours, theirs):
        step.run()
    gold = theirs.buffers["kda_out"]
    assert_close(ours.buffers["kda_out"].cpu(), gold.cpu(), CONTRACT.tolerance, "kda_out")
    moved = [span.slot for span in spans if not span.is_verify]
    assert_near(ours.states[moved].cpu(), theirs.states[moved].cpu(), "states", BOUND)
    kept = [slot for slot in range(6) if slot not in moved]
    bit_equal(ours.states[kept].cpu(), before[kept].cpu(), "other slots")
    assert ours.buffers.effects.keys() == theirs.buffers.effects.keys()
    # What was recorded stays when the buffers are the next step's.
    for name in ("kda_decay", "kda_proj"):
        poison_(ours.buffers[name])
    for key, effects in ours.buffers.effects.items():
        moved_by = []
        for step, own in ((ours, effects), (theirs, theirs.buffers.effects[key])):
            window = torch.zeros(3, 3 * HEADS * width, device=cases.DEVICE).bfloat16()
            move(window, step.states[key[0]], own, 2)
            moved_by.append((window.cpu(), step.states[key[0]].cpu()))
        bit_equal(moved_by[0][0], moved_by[1][0], "window")
        assert_near(moved_by[0][1], moved_by[1][1], "committed", BOUND)


def test_refusals():
    config = tiny_k3()
    problem = cases_problem(replace(config, kda=replace(config.kda, head_dim=8)))
    assert "the model's have 8" in triton_impl.refuse(problem)[0]
    with pytest.raises(ValueError, match="the model's have 8"):
        triton_impl.prepare(problem, None, Buffers())
