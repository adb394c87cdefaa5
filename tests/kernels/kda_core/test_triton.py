"""kda_core in Triton against the stages that it covers, and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import kda_triton_cases as kda
import pytest
import torch
import triton_cases as cases

from kdecode.kernels.common.tile_table import TileKey, forced
from kdecode.kernels.kda_core import triton_impl
from kdecode.kernels.kda_core.triton_impl import CoreTile
from kdecode.testing.compare import bit_equal

FORMS = ["k3", "linear"]


@lru_cache
def case_of(form: str, head_dim: int = 16, heads: int = 2) -> cases.Case:
    return cases.make_case(kda.config_of(form, head_dim, heads))


def chain_of(case: cases.Case, rows: int, each: int = 1) -> cases.Chain:
    return cases.Chain(case, [cases.Use("kda_core", 1)], rows, each)


@pytest.mark.parametrize(("form", "rows"), [("k3", 1), ("linear", 3), ("k3", 8)])
def test_decode_rows(form, rows):
    chain = chain_of(case_of(form), rows)
    found = chain.check(cases.decode_step([5, 0, 17, 1, 2, 40, 9, 3][:rows]))
    assert {check.buffer for check in found} == {"attn_out", "conv", "recurrent"}
    # Other slots, the same launch.
    chain.check(cases.decode_step([8] * rows, turn=1), seed=1)


def test_many_rows():
    chain_of(case_of("k3", heads=1), 64).check(cases.decode_step([4] * 64))


@pytest.mark.parametrize(
    ("form", "requests", "each"), [("k3", 1, 4), ("linear", 1, 8), ("k3", 3, 2)]
)
def test_verify_rows(form, requests, each):
    """Slots are moved past all rows by what was recorded, and compared then."""
    chain = chain_of(case_of(form), requests * each, each)
    found = chain.check(cases.verify_step([5, 0, 30][:requests], each))
    assert {check.buffer for check in found} == {"attn_out", "conv", "recurrent"}
    chain.check(cases.verify_step([9] * requests, each, turn=1), seed=1)


@pytest.mark.parametrize(
    ("form", "head_dim", "block_v", "rows", "each"),
    [
        ("k3", 48, 64, 2, 1),
        ("k3", 48, 16, 4, 2),
        ("linear", 48, 16, 2, 1),
        ("linear", 32, 16, 4, 2),
    ],
)
def test_sizes_and_splits(form, head_dim, block_v, rows, each):
    """Heads whose width is no power of two, and heads that several programs share."""
    case = case_of(form, head_dim)
    key = TileKey("kda_core", "sm_90", triton_impl.shape_key(case.problem(1, rows, each)))
    with forced({key: CoreTile(block_v, 4)}):
        chain = chain_of(case, rows, each)
    step = cases.decode_step([5, 0]) if each == 1 else cases.verify_step([7, 3], each)
    chain.check(step)
    # Arrivals are counted from zero again.
    chain.check(step, seed=1)


@pytest.mark.parametrize(("form", "block_v"), [("k3", 32), ("linear", 16)])
def test_rows_of_one_slot_see_each_other(form, block_v):
    """Six rows, three of them of one slot, are six steps of one row, bit for bit."""
    case, slots = case_of(form, 32, 1), [3, 0, 5, 5, 5, 1]
    proj = kda.projections(case.config, len(slots))
    together, alone = kda.Slots(case, set(slots)), kda.Slots(case, set(slots))
    tiles = {
        TileKey("kda_core", "sm_90", triton_impl.shape_key(case.problem(1, rows))): CoreTile(
            block_v, 4
        )
        for rows in (1, len(slots))
    }
    with forced(tiles):
        out = together.run(proj, slots)["attn_out"]
        for row, slot in enumerate(slots):
            own = alone.run(proj[row : row + 1], [slot])["attn_out"]
            bit_equal(out[row].cpu(), own[0].cpu(), f"row {row}")
    for slot in range(6):
        for ours, theirs in zip(together.state(slot), alone.state(slot), strict=True):
            bit_equal(ours.cpu(), theirs.cpu(), f"slot {slot}")


def test_a_run_longer_than_a_block():
    """Rows of one slot whose gates take two products; the second sees what the first left."""
    case = case_of("linear", heads=1)
    proj = kda.projections(case.config, 18)
    together, alone = kda.Slots(case, [2]), kda.Slots(case, [2])
    out = together.run(proj, [2] * 18)["attn_out"]
    own = [alone.run(proj[row : row + 1], [2])["attn_out"][0] for row in range(18)]
    bit_equal(out.cpu(), torch.stack(own).cpu(), "attn_out")
    for ours, theirs in zip(together.state(2), alone.state(2), strict=True):
        bit_equal(ours.cpu(), theirs.cpu(), "slot")


@pytest.mark.parametrize("form", FORMS)
def test_verify_rows_only_read_the_slots(form):
    """Their outputs are those of the rows one by one; the slots keep their bits."""
    case, slots = case_of(form, heads=1), [4] * 3 + [0] * 3
    proj = kda.projections(case.config, len(slots))
    verified, plain = kda.Slots(case, set(slots)), kda.Slots(case, set(slots))
    before = [verified.state(slot) for slot in range(6)]
    buffers = verified.run(proj, slots, each=3)
    for row, slot in enumerate(slots):
        own = plain.run(proj[row : row + 1], [slot])["attn_out"]
        bit_equal(buffers["attn_out"][row].cpu(), own[0].cpu(), f"row {row}")
    for slot, state in enumerate(before):
        for ours, theirs in zip(verified.state(slot), state, strict=True):
            bit_equal(ours.cpu(), theirs.cpu(), f"slot {slot}")
    samples = proj[:, : 3 * case.config.kda.width]
    bit_equal(buffers.effects[kda.LAYER].samples.cpu(), samples, "samples")


def test_refusals():
    case = case_of("k3")
    problem = replace(case.problem(1, 1), rows=None)
    bad = replace(case.config, kda=replace(case.config.kda, head_dim=8, conv_width=3))
    text = "\n".join(triton_impl.refuse(replace(problem, config=bad)))
    for part in ("takes any number", "model's has 3", "model's have 8"):
        assert part in text
    with pytest.raises(ValueError, match="takes any number"):
        triton_impl.prepare(problem, None, chain_of(case, 1).buffers)
