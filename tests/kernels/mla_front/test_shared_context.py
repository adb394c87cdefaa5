"""mla_front of ranks that share the positions of a context, against the step of one rank.

Ranks are threads, each with a pool of its own. Cache rows that a rank does not have are NaN.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import attention_cases as cases
import pytest
import torch
from mla_front_cases import LAYER, Run

from kdecode.kernels.common.fused import part_bytes
from kdecode.kernels.common.native import Pool, supported_isas
from kdecode.kernels.contract import Tolerance
from kdecode.kernels.mla_front import cpu
from kdecode.model.rank_share import take
from kdecode.parallel.context import ContextShare
from kdecode.parallel.shared import Segment, join
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poisoned
from kdecode.testing.ranks import run_ranks

ISAS = supported_isas()
HEADS = 16
# One rounding of the result to bf16 apart, and sums in another order.
CLOSE = Tolerance(rtol=2**-7, atol=2e-3, rms_ratio=4e-3)
# By number of ranks and positions in turn, of pages of 64 positions.
SHARES = [(2, 1), (2, 16), (4, 1), (4, 16), (8, 8), (16, 1)]
# Decode rows around page borders; a verify step of two requests; one that a request begins with.
STEPS = {
    "decode": ([0, 1, 15, 16, 17, 63, 64, 300], None),
    "verify": ([60, 61, 62, 63, 64, 127, 128, 129, 130, 131], [0] * 5 + [1] * 5),
    "first": ([0, 1, 2, 3, 4, 5, 6, 7], [0] * 8),
}


def _model(form, heads=HEADS):
    config = cases.model(form, "small")
    return replace(config, mla=replace(config.mla, num_heads=heads))


def _setting(isa, cache_dtype, pool):
    return cases.Setting(isa, pool, cache_dtype, page_tokens=64, max_context_tokens=4096)


class RankRun:
    """One rank's step, on its rows of the pages of a `Run`; inputs are the same on all ranks."""

    def __init__(self, whole, inputs, ranks, interleave, shared):
        self.context = ContextShare(ranks, interleave)
        heads = ranks.part(whole.config.mla.num_heads)
        config = replace(whole.config, mla=replace(whole.config.mla, num_heads=heads))
        setting = replace(whole.setting, pool=Pool(1, True))
        self.pages = _pages(whole, self.context)
        self.buffers = cases.buffers_of(config, LAYER, inputs, setting)
        self.buffers["row_pages"] = whole.buffers["row_pages"].clone()
        self.buffers["row_position"] = whole.buffers["row_position"].clone()
        self.buffers.caches = SimpleNamespace(
            pages={LAYER: self.pages}, scales={LAYER: whole.scale}
        )
        self.buffers.shared = shared
        self.problem = replace(
            setting.problem(config, LAYER, len(whole.positions)), ranks=ranks, context=self.context
        )
        assert cpu.refuse(self.problem) == []
        packed = cases.pack_layer(_part(whole.parameters, ranks), config)
        self.step = cpu.prepare(self.problem, packed, self.buffers)


def _row(pages, context, table, position):
    """The cache row of a position on the rank that has it."""
    page = table[position // (pages.shape[1] * context.ranks.size)]
    return pages[page, context.index(position) % pages.shape[1]]


def _pages(whole, context):
    """A rank's pages before the step."""
    count, page_tokens, width = whole.pages.shape
    pages = poisoned((count, context.page_rows(page_tokens), width), whole.pages.dtype)
    for table, stored in zip(whole.tables, whole.stored, strict=True):
        for position in range(len(stored)):
            if context.owner(position) == context.ranks.rank:
                _row(pages, context, table, position).copy_(stored[position])
    return pages


def _part(parameters, ranks):
    """What a rank has of a layer."""
    attention = parameters.attention
    parts = {
        field.name: take(getattr(attention, field.name), f"attention.{field.name}", ranks)
        for field in fields(attention)
        if getattr(attention, field.name) is not None
    }
    return replace(parameters, attention=replace(attention, **parts))


def _run(whole, inputs, size, interleave):
    """Every rank's run of the step of ``whole``, in order."""
    rows = len(whole.positions)
    lanes = rows * whole.config.mla.num_heads
    arrays = 4 * lanes * whole.config.mla.kv_rank, 4 * lanes * 2
    segment = Segment(size, part_bytes(arrays))

    def body(ranks, exchange):
        shared = join(segment.path, segment.part_bytes, ranks, num_threads=1, timeout_s=20.0)
        run = RankRun(whole, inputs, ranks, interleave, shared)
        run.step.run()
        assert shared.failure is None
        # Queries, then sums.
        assert shared.number == 2
        return run

    try:
        return run_ranks(size, body)
    finally:
        segment.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("size", "interleave"), SHARES)
def test_values_and_rows(isa, cache_dtype, step, size, interleave):
    config = _model("k3" if interleave == 1 else "linear")
    positions, requests = STEPS[step]
    inputs = cases.inputs_of(config, LAYER, len(positions))
    whole = Run(config, _setting(isa, cache_dtype, Pool(1)), inputs, positions, requests)
    runs = _run(whole, inputs, size, interleave)
    whole.run()
    for name in ("attn_mix", "attn_in"):
        for run in runs:
            bit_equal(run.buffers[name], whole.buffers[name], name)
    for name in ("mla_query", "mla_latent", "attn_out"):
        joined = torch.cat([run.buffers[name] for run in runs], dim=1)
        if name == "mla_query":
            bit_equal(joined, whole.buffers[name], name)
        assert_close(joined, whole.buffers[name], CLOSE, name)
    for row, position in enumerate(positions):
        owner = runs[runs[0].context.owner(position)]
        table = whole.tables[whole.requests[row]]
        found = _row(owner.pages, owner.context, table, position)
        bit_equal(found, whole.cached(row), f"row {row}")


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_other_rows_stay(cache_dtype):
    config = _model("k3")
    positions, requests = STEPS["verify"]
    inputs = cases.inputs_of(config, LAYER, len(positions))
    whole = Run(config, _setting(ISAS[0], cache_dtype, Pool(1)), inputs, positions, requests)
    runs = _run(whole, inputs, 4, 16)
    for run in runs:
        before, context = _pages(whole, run.context), run.context
        for row, position in enumerate(positions):
            if context.owner(position) == context.ranks.rank:
                place = context, whole.tables[whole.requests[row]], position
                _row(before, *place).copy_(_row(run.pages, *place))
        bit_equal(run.pages, before, "other cache rows")
