"""The Triton steps of latent attention, as a chain against the reference and alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DEVICE, Chain, Use, decode_step, k3_config, linear_config, make_case
from triton_cases import verify_step as verify

from kdecode.cache.caches import Caches
from kdecode.decode import buffers
from kdecode.decode.buffers import allocate, device_buffers, input_buffers, value_buffers
from kdecode.kernels.common.mla_splits import ROUND_TOKENS, max_splits
from kdecode.kernels.common.triton_mla import e4m3_bits, split_length
from kdecode.kernels.contract import PlanMemory, Problem
from kdecode.kernels.mla_attend import triton_impl as attend
from kdecode.kernels.mla_query import triton_impl as query
from kdecode.kernels.mla_query_up import triton_impl as query_up
from kdecode.kernels.mla_value import triton_impl as value
from kdecode.kernels.mla_value.op import CONTRACT
from kdecode.model import reference as ref
from kdecode.model.layout import pack_layer, to_device
from kdecode.testing.cases import random_parameters
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poison_, poisoned

LAYER = 3


@cache
def model(form):
    """Layer 3 is an MLA layer; MLPs are dense because nobody runs them here."""
    config = k3_config() if form == "k3" else linear_config()
    return make_case(replace(config, mlp_kinds=("dense",) * config.num_layers))


def chain(form, rows, each=1, cache_dtype="bf16"):
    ops = ["mla_query", "mla_attend", "mla_value"]
    if form == "k3":
        ops.insert(0, "mla_query_up")
    return Chain(model(form), [Use(op, LAYER) for op in ops], rows, each, cache_dtype)


@pytest.mark.parametrize(
    ("form", "cache_dtype", "contexts"),
    [
        ("k3", "bf16", [127]),
        ("k3", "fp8", [0, 70]),
        ("k3", "bf16", [8, 63, 64]),
        ("linear", "bf16", [64]),
        ("linear", "fp8", [7, 100, 15]),
    ],
)
def test_two_steps_of_one_plan(form, cache_dtype, contexts):
    """Every buffer, the inserted cache rows, and nothing else changed; then in other pages."""
    steps = chain(form, len(contexts), cache_dtype=cache_dtype)
    steps.check(decode_step(contexts))
    if len(contexts) > 1:
        steps.check(decode_step(contexts[::-1], turn=1))


@pytest.mark.parametrize(
    ("form", "cache_dtype", "contexts", "each"),
    [("k3", "bf16", [60], 8), ("k3", "fp8", [13, 62], 4), ("linear", "bf16", [0], 4)],
)
def test_rows_that_are_verified(form, cache_dtype, contexts, each):
    """Rows of one request, over the end of a split, a page, a round."""
    chain(form, len(contexts) * each, each, cache_dtype).check(verify(contexts, each))


def test_sixty_four_rows():
    chain("linear", 64).check(decode_step([0, 1, 7, 8] * 15 + [63, 64, 65, 20]))


class Alone:
    """`mla_attend` and `mla_value` on random queries and cache rows of any sizes."""

    def __init__(self, contexts, each=1, cache_dtype="bf16", page_tokens=64, heads=2, seed=0):
        config = k3_config()
        mla = replace(config.mla, num_heads=heads, kv_rank=64, nope_dim=16, rope_dim=16, v_dim=16)
        # Both kinds of attention write attn_out, so they are equally wide.
        kda = replace(config.kda, num_heads=heads, head_dim=mla.v_dim)
        kinds = ("dense",) * config.num_layers
        self.config = replace(config, mla=mla, kda=kda, mlp_kinds=kinds)
        self.positions = [context + place for context in contexts for place in range(each)]
        self.each, self.scale = each, 0.3 if cache_dtype == "fp8" else 1.0
        self.parameters = random_parameters(self.config).layers[LAYER]
        self.packed = to_device(pack_layer(self.parameters, self.config, "rows", None), DEVICE)
        generator = torch.Generator().manual_seed(seed)
        rows, longest = len(self.positions), max(self.positions) + 1
        max_pages = -(-longest // page_tokens)
        specs = (*input_buffers(rows, max_pages), *value_buffers(self.config, rows))
        specs = (*specs, *device_buffers(self.config, rows))
        self.buffers = allocate(specs, PlanMemory(DEVICE))
        for tensor in self.buffers.values():
            poison_(tensor)
        self._fill(contexts, cache_dtype, page_tokens, max_pages, generator)
        problem = Problem(
            self.config, LAYER, rows, each, DEVICE, cache_dtype, page_tokens, longest, ""
        )
        self.steps = [m.prepare(problem, self.packed, self.buffers) for m in (attend, value)]

    def _fill(self, contexts, cache_dtype, page_tokens, max_pages, generator):
        mla, dtype = self.config.mla, torch.bfloat16
        order = torch.randperm(len(contexts) * max_pages + 1, generator=generator)
        stored_type = dtype if cache_dtype == "bf16" else torch.float8_e4m3fn
        pages = poisoned((len(order), page_tokens, mla.cache_width), stored_type)
        table = torch.full((len(self.positions), max_pages), -1, dtype=torch.int32)
        self.stored = []
        for number, context in enumerate(contexts):
            tokens = context + self.each
            rows = torch.randn(tokens, mla.cache_width, generator=generator).to(dtype)
            rows = ref.store_rows(rows, cache_dtype, self.scale)
            self.stored.append(rows)
            own = order[number * max_pages :][: -(-tokens // page_tokens)]
            places = own[torch.arange(tokens) // page_tokens] * page_tokens
            places += torch.arange(tokens) % page_tokens
            flat = pages.view(torch.uint8).flatten(0, 1)
            flat[places] = rows.contiguous().view(torch.uint8)
            table[number * self.each :, : len(own)][: self.each] = own.int()
        inputs = {"row_pages": table, "row_position": torch.tensor(self.positions).int()}
        for name in ("mla_query", "mla_proj"):
            inputs[name] = torch.randn(self.buffers[name].shape, generator=generator).to(dtype)
        for name, tensor in inputs.items():
            self.buffers[name].copy_(tensor)
        self.query, self.proj = inputs["mla_query"], inputs["mla_proj"]
        self.buffers.caches = Caches.allocate(self.config, "cpu", 1, 1, page_tokens)
        self.buffers.caches.pages[LAYER] = pages.to(DEVICE)
        self.buffers.caches.scales[LAYER] = self.scale

    def run(self):
        for step in self.steps:
            step.run()
        return {name: self.buffers[name].cpu() for name in ("mla_latent", "attn_out")}

    def expected(self):
        mla, latents = self.config.mla, []
        for number, stored in enumerate(self.stored):
            rows = ref.load_rows(stored, ref.ROUNDED, self.scale)
            own = self.query[number * self.each :][: self.each]
            start = len(stored) - self.each
            latents.append(ref.mla_attend(mla, own, rows, start, ref.ROUNDED))
        latent = torch.cat(latents)
        out = ref.mla_value(self.parameters.attention, mla, latent, self.proj, ref.ROUNDED)
        return {"mla_latent": latent, "attn_out": out}


@pytest.mark.parametrize(
    ("contexts", "each", "cache_dtype", "page_tokens", "heads"),
    [
        ([510, 900, 64], 1, "fp8", 64, 3),
        ([250], 8, "bf16", 16, 9),  # two blocks of lanes, pages shorter than a round
        ([250, 3], 4, "fp8", 48, 5),  # a round in two pages
    ],
)
def test_contexts_of_any_length(contexts, each, cache_dtype, page_tokens, heads):
    alone = Alone(contexts, each, cache_dtype, page_tokens, heads)
    found, expected = alone.run(), alone.expected()
    for name, gold in expected.items():
        assert_close(found[name], gold.view(found[name].shape), CONTRACT.tolerance, name)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_splits_of_several_rounds(cache_dtype, monkeypatch):
    """As of a context that is longer than the most splits of one round."""
    for module in (buffers, attend, value):
        monkeypatch.setattr(module, "max_splits", lambda rows: 4)
    alone = Alone([600, 270, 1], 1, cache_dtype, 64, 3)
    found, expected = alone.run(), alone.expected()
    for name, gold in expected.items():
        assert_close(found[name], gold.view(found[name].shape), CONTRACT.tolerance, name)


def test_a_row_does_not_depend_on_the_others():
    """The same bits beside longer and shorter contexts, with which it shares a plan."""
    first, second = Alone([130, 20, 90]), Alone([130, 200, 0])
    for name in ("mla_query", "mla_proj"):
        second.buffers[name][0].copy_(first.buffers[name][0])
    for position in range(131):
        pages = [a.buffers.caches.pages[LAYER] for a in (second, first)]
        table = [a.buffers["row_pages"][0, position // 64] for a in (second, first)]
        pages[0][table[0], position % 64] = pages[1][table[1], position % 64]
    one, other = first.run(), second.run()
    for name in one:
        bit_equal(one[name][0], other[name][0], name)


@triton.jit
def lengths_kernel(contexts, out, SPLITS: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, split_length(tl.load(contexts + at), SPLITS))


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_length_of_a_split(rows):
    """The shortest power of two that covers the context."""
    splits = max_splits(rows)
    contexts = [0, 1, 64 * splits, 64 * splits + 1, 128 * splits, 131_072, 1 << 20, 1_000_000]
    given = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(given)
    lengths_kernel[(1,)](given, out, SPLITS=splits, COUNT=8)
    for context, length in zip(contexts, out.tolist(), strict=True):
        assert length * splits >= context
        assert length == ROUND_TOKENS or length * splits < 2 * context
        assert length & (length - 1) == 0


@triton.jit
def bits_kernel(x, out, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + at, e4m3_bits(tl.load(x + at)))


def test_every_bf16_number_as_e4m3():
    """And its neighbours in fp32, which decide ties."""
    wide = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    bits = wide.view(torch.int32)
    numbers = torch.cat([bits, bits + 1, bits - 1]).view(torch.float32)
    gold = numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    out = torch.empty(len(numbers), dtype=torch.uint8, device=DEVICE)
    bits_kernel[(len(numbers) // 4096,)](numbers.to(DEVICE), out, COUNT=4096)
    out, is_nan = out.cpu(), torch.isnan(numbers)
    assert torch.equal(out[~is_nan], gold[~is_nan])
    assert bool((out[is_nan] & 0x7F == 0x7F).all())


def test_refusals():
    problem = model("linear").problem(LAYER, 0)
    mla = replace(problem.config.mla, rope_dim=7)
    problem = replace(
        problem,
        config=replace(problem.config, mla=mla),
        cache_dtype="int4",
        rotation_scale=0.5,
        rows_per_request=2,
    )
    assert len(query_up.refuse(problem)) == 3
    assert len(query.refuse(problem)) == 3
    assert len(value.refuse(replace(problem, rows=None))) == 2
    text = "\n".join(attend.refuse(replace(problem, rows=65)))
    for part in ("this has 65", "rotated in pairs; a head has 7", "int4 was asked", "of 2 each"):
        assert part in text
