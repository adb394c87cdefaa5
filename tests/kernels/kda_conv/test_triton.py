"""kda_conv in Triton against torch's: the same buffers, windows and steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_cases as cases

from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.contract import Buffers
from kdecode.kernels.kda_conv import torch_impl, triton_impl
from kdecode.kernels.kda_conv.op import CONTRACT
from kdecode.testing.cases import tiny_k3
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poisoned


def span_of(first, last, slot, is_verify=False):
    return RequestSpan(first, last, 0, slot, torch.empty(0), None, is_verify)


def problem_of(**kda):
    config = tiny_k3()
    config = replace(config, kda=replace(config.kda, **kda))
    return cases.Case(config, None, None).problem(1, 1)


class Step:
    """A step of the standard path on its own windows, NaN but for those in use."""

    def __init__(self, module, spans, heads):
        problem = problem_of(num_heads=heads)
        rows, channels = spans[-1].last, 3 * problem.config.kda.width
        generator = torch.Generator().manual_seed(5)
        proj = torch.randn(rows, channels + 21, generator=generator).bfloat16()
        taps = torch.randn(4, channels, generator=generator)
        self.windows = poisoned((7, 3, channels), torch.bfloat16)
        for span in spans:
            self.windows[span.slot] = torch.randn(3, channels, generator=generator)
        self.windows = self.windows.to(cases.DEVICE)
        self.buffers = Buffers(kda_proj=proj.to(cases.DEVICE))
        self.buffers.caches = SimpleNamespace(conv={1: self.windows})
        self.buffers.products = SimpleNamespace(isa=None)
        single = [span for span in spans if span.num_rows == 1]
        self.buffers.step = SimpleNamespace(
            single=tuple(single),
            multi=tuple(span for span in spans if span.num_rows > 1),
            single_rows=torch.tensor([span.first for span in single], device=cases.DEVICE),
            single_slots=torch.tensor([span.slot for span in single], device=cases.DEVICE),
        )
        weights = SimpleNamespace(conv=taps.to(cases.DEVICE))
        module.prepare(problem, weights, self.buffers).run()


@pytest.mark.parametrize("heads", [2, 11])
@pytest.mark.parametrize(
    "spans",
    [
        [span_of(0, 1, 3)],
        [span_of(0, 1, 6), span_of(1, 3, 0), span_of(3, 4, 2), span_of(4, 7, 5)],
        [span_of(0, 5, 1, True), span_of(5, 44, 4), span_of(44, 45, 0)],
    ],
)
def test_a_step_equals_that_of_torch(spans, heads):
    ours, theirs = (Step(module, spans, heads) for module in (triton_impl, torch_impl))
    actual, gold = (step.buffers["kda_qkv"].cpu() for step in (ours, theirs))
    assert_close(actual, gold, CONTRACT.tolerance, "kda_qkv")
    # Raw samples, and the slots of rows that are verified or of nobody.
    bit_equal(ours.windows.cpu(), theirs.windows.cpu(), "windows")


def test_refusals():
    problem = problem_of(conv_width=3)
    assert "the model's has 3" in triton_impl.refuse(problem)[0]
    with pytest.raises(ValueError, match="the model's has 3"):
        triton_impl.prepare(problem, None, Buffers())
