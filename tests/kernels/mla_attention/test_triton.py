"""mla_attention with kernels for decode rows against the same op in torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from triton_cases import DEVICE, k3_config, linear_config, make_case

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.decode.buffers import value_buffers
from kdecode.decode.step_check import StepLimits
from kdecode.decode.step_tensors import decode_rows, derive
from kdecode.kernels.contract import Buffers
from kdecode.kernels.linear.product import ProductSettings
from kdecode.kernels.mla_attention import torch_impl, triton_impl
from kdecode.kernels.mla_attention.op import CONTRACT
from kdecode.testing.compare import assert_close, bit_equal

LAYER, PAGE_TOKENS = 3, 16


@cache
def model(form):
    config = k3_config() if form == "k3" else linear_config()
    return make_case(replace(config, mlp_kinds=("dense",) * config.num_layers))


def batch_of(spans):
    """spans: (tokens cached, new tokens, whether they are verified) of each request."""
    requests, page = [], 0
    for number, (start, count, is_verify) in enumerate(spans):
        pages = tuple(range(page, page + -(-(start + count) // PAGE_TOKENS)))[::-1]
        page += len(pages)
        tokens = tuple(range(count))
        requests.append(
            StepRequest(tokens, start, number, pages, is_decode=True, is_verify=is_verify)
        )
    return StepBatch(tuple(requests))


def run(module, case, batch, cache_dtype):
    """(attn_out, pages) after one step on caches of random rows."""
    config = case.config
    generator = torch.Generator().manual_seed(1)
    caches = Caches.allocate(
        config, DEVICE, 8, 24, PAGE_TOKENS, cache_dtype=cache_dtype, scales={3: 0.3, 4: 0.3}
    )
    pages = torch.randn(caches.pages[LAYER].shape, generator=generator)
    caches.pages[LAYER].copy_(pages.to(caches.pages[LAYER].dtype))
    limits = StepLimits.of(config, caches, 256)
    step = derive(batch, limits, DEVICE)
    buffers = Buffers()
    buffers.step = replace(step, decode_rows=decode_rows(batch, limits, DEVICE))
    buffers.caches, buffers.products = caches, ProductSettings(DEVICE, None)
    specs = {spec.name: spec for spec in value_buffers(config, step.num_rows)}
    proj = torch.randn(specs["mla_proj"].shape, generator=generator)
    buffers["mla_proj"] = proj.to(DEVICE, torch.bfloat16)
    problem = replace(case.problem(LAYER, 1, cache_dtype=cache_dtype), rows=None)
    problem = replace(problem, page_tokens=PAGE_TOKENS, max_context_tokens=256)
    assert module.refuse(problem) == []
    weights = case.packed.layers[LAYER].attention
    with torch.no_grad():
        module.prepare(problem, weights, buffers).run()
    return buffers["attn_out"].cpu(), caches.pages[LAYER].cpu()


@pytest.mark.parametrize(
    ("form", "cache_dtype", "spans"),
    [
        ("k3", "bf16", [(20, 1, False), (0, 1, False), (90, 1, False)]),
        ("k3", "fp8", [(3, 1, False), (30, 12, False), (17, 4, True), (5, 2, False)]),
        ("linear", "bf16", [(14, 4, True), (60, 4, True)]),
        ("linear", "fp8", [(0, 9, False)]),
    ],
    ids=["decode", "mixed", "verify", "prompt"],
)
def test_as_in_torch(form, cache_dtype, spans, monkeypatch):
    """In blocks of four rows, where there are more."""
    monkeypatch.setattr(triton_impl, "_ROWS", 4)
    case, batch = model(form), batch_of(spans)
    found, pages = run(triton_impl, case, batch, cache_dtype)
    expected, stored = run(torch_impl, case, batch, cache_dtype)
    assert_close(found, expected, CONTRACT.tolerance, "attn_out")
    near = replace(CONTRACT.tolerance, rtol=0.13, atol=2e-2)  # a neighbour of E4M3
    limit = near if cache_dtype == "fp8" else CONTRACT.tolerance
    assert_close(pages.float(), stored.float(), limit, "pages")
    last = len(pages) - 1
    bit_equal(pages[last], stored[last], "a page of nobody")


def test_rows_that_kernels_take():
    """Requests of up to eight new tokens, in the step's order; tables as wide as the longest."""
    case = model("k3")
    caches = Caches.allocate(case.config, "cpu", 8, 24, PAGE_TOKENS)
    limits = StepLimits.of(case.config, caches, 256)
    batch = batch_of([(20, 1, False), (0, 9, False), (40, 8, True)])
    rows = decode_rows(batch, limits, "cpu")
    assert rows is not None
    assert rows.index.tolist() == [0, *range(10, 18)]
    assert (rows.each, rows.count) == (1, 9)
    assert rows.position.tolist() == [20, *range(40, 48)]
    assert rows.pages.tolist() == [[1, 0, -1]] + [[5, 4, 3]] * 8
    assert decode_rows(batch_of([(0, 9, False)]), limits, "cpu") is None
    rows = decode_rows(batch_of([(3, 4, True), (7, 4, True)]), limits, "cpu")
    assert (rows.each, rows.index) == (4, None)


def test_refusals():
    problem = replace(model("k3").problem(LAYER, 1), rows=None, cache_dtype="int4")
    assert triton_impl.refuse(problem) == ["Triton MLA caches are bf16 or fp8; int4 was asked for."]
