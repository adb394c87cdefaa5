"""The native second half of a mixture of experts against the reference stages that it covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mlp_cases import (
    MOE_LAYER,
    NUM_EXPERTS,
    ROWS,
    TOP_K,
    assert_rounded_alike,
    latent_config,
    make_buffers,
    make_case,
    plain_config,
    prepare,
)

from kdecode.kernels.moe_tail.cpu import refuse
from kdecode.kernels.moe_tail.op import CONTRACT
from kdecode.model import reference
from kdecode.model.reference import GOLD, ROUNDED
from kdecode.testing.compare import assert_close, bit_equal

CASES = {
    "latent mxfp4": make_case(latent_config("mxfp4")),
    "latent bf16": make_case(latent_config("bf16")),
    "latent without norm": make_case(latent_config("bf16", has_latent_norm=False)),
    "plain bf16": make_case(plain_config("bf16")),
    "plain mxfp4 without shared": make_case(plain_config("mxfp4", num_shared=0)),
}


def inputs(case, rows, pool, seed=2):
    """Poisoned buffers with random inputs; rows 0 and 1 have all but one expert in common."""
    buffers = make_buffers(case.config, rows, pool)
    generator = torch.Generator().manual_seed(seed)
    for name in ("prefix", "mlp_in", "latent", "shared_product"):
        if name in buffers:
            buffers[name].copy_(torch.randn(buffers[name].shape, generator=generator))
    ids = [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)]
    if rows > 1:
        others = [i for i in range(NUM_EXPERTS) if i not in ids[0]]
        ids[1] = torch.tensor([*ids[0].flip(0)[:-1].tolist(), others[0]])
    buffers["route_ids"].copy_(torch.stack(ids))
    buffers["route_weights"].copy_(torch.rand(rows, TOP_K, generator=generator))
    return buffers


def run(case, buffers, isa):
    """Buffers after the step, and the prefix before it."""
    before = buffers["prefix"].clone()
    prepare(case, "moe_tail", MOE_LAYER, buffers, isa).run()
    return buffers, before


def expert_sum(case, buffers, rounding):
    source = buffers["latent" if case.moe().latent_down is not None else "mlp_in"]
    route = (buffers["route_ids"], buffers["route_weights"])
    return reference.experts(case.moe(), case.config.activation, source, *route, rounding)


def outputs(case, buffers, expert_sum, rounding):
    """What follows the sum of the experts, by buffer; the shared experts from their product."""
    moe, found = case.moe(), {}
    if moe.latent_up is not None:
        found["routed"] = reference.latent_up(moe, expert_sum, case.config.rms_eps, rounding)
    if moe.shared is not None:
        found["shared"] = reference.linear(
            buffers["shared_product"], moe.shared.down_proj, rounding
        )
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_matches_the_reference(name, rows, pool, isa):
    case = CASES[name]
    buffers, before = run(case, inputs(case, rows, pool), isa)
    gold = {"expert_sum": expert_sum(case, buffers, GOLD)}
    gold |= outputs(case, buffers, gold["expert_sum"], GOLD)
    for buffer, value in gold.items():
        assert_close(buffers[buffer], value, CONTRACT.tolerance, buffer)
    rounded = {"expert_sum": expert_sum(case, buffers, ROUNDED)}
    # From the step's own sum, so that no rounding of it matters.
    rounded |= outputs(case, buffers, buffers["expert_sum"], ROUNDED)
    for buffer, value in rounded.items():
        assert_rounded_alike(buffers[buffer], value, buffer)
    routed = buffers["routed" if "routed" in buffers else "expert_sum"]
    shared = buffers.get("shared", torch.zeros_like(routed))
    bit_equal(buffers["mlp_delta"], (routed.float() + shared.float()).bfloat16(), "mlp_delta")
    prefix = reference.mlp_residual(before, routed, shared, ROUNDED)
    bit_equal(buffers["prefix"], prefix, "prefix")


@pytest.mark.parametrize("name", CASES)
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(name, pool, two_threads, isa):
    case = CASES[name]
    together = inputs(case, 8, two_threads)
    alone = make_buffers(case.config, 1, pool)
    for buffer in CONTRACT.reads:
        if buffer in alone:
            alone[buffer].copy_(together[buffer][1:2])
    run(case, together, isa)
    run(case, alone, isa)
    for buffer in CONTRACT.writes:
        if buffer in alone:
            bit_equal(alone[buffer][0], together[buffer][1], buffer)


def test_all_rows_may_choose_one_expert_set(pool, isa):
    case = CASES["latent mxfp4"]
    buffers = inputs(case, 64, pool)
    buffers["route_ids"][:] = torch.arange(TOP_K, dtype=torch.int32)
    run(case, buffers, isa)
    assert_rounded_alike(buffers["expert_sum"], expert_sum(case, buffers, ROUNDED), "expert_sum")


def test_the_result_does_not_depend_on_memory_left_by_another_step(pool, isa):
    """Scratch is shared by all layers: a second run finds the first one's values there."""
    case = CASES["latent mxfp4"]
    buffers = inputs(case, 5, pool)
    step = prepare(case, "moe_tail", MOE_LAYER, buffers, isa)
    step.run()
    first = {name: buffers[name].clone() for name in CONTRACT.writes}
    again = inputs(case, 5, pool, seed=3)
    for name in CONTRACT.reads:
        buffers[name].copy_(again[name])
    step.run()
    again = inputs(case, 5, pool)
    for name in CONTRACT.reads:
        buffers[name].copy_(again[name])
    step.run()
    for name, value in first.items():
        bit_equal(buffers[name], value, name)


def test_ids_out_of_range_read_nothing_and_make_their_row_nan(pool, isa):
    case = CASES["latent mxfp4"]
    clean, _ = run(case, inputs(case, 4, pool), isa)
    buffers = inputs(case, 4, pool)
    buffers["route_ids"][1, 0] = NUM_EXPERTS
    buffers["route_ids"][2, 4] = -(2**31)
    run(case, buffers, isa)
    assert buffers["prefix"][1:3].isnan().all()
    for name in CONTRACT.writes:
        bit_equal(buffers[name][[0, 3]], clean[name][[0, 3]], name)


def test_one_expert_in_every_slot_is_not_out_of_bounds(pool, isa):
    """Not a route that moe_front makes; the groups of a step have to hold it all the same."""
    case = CASES["latent bf16"]
    buffers = inputs(case, 64, pool)
    buffers["route_ids"].fill_(7)
    run(case, buffers, isa)
    assert_rounded_alike(buffers["expert_sum"], expert_sum(case, buffers, ROUNDED), "expert_sum")


def test_refuses_with_every_reason():
    case = CASES["latent mxfp4"]
    assert refuse(case.problem(MOE_LAYER, 64, "portable")) == []
    moe = replace(case.config.moe, num_experts=5000, top_k=65, expert_width=50, latent_width=90)
    config = replace(case.config, moe=moe)
    reasons = refuse(replace(case, config=config).problem(MOE_LAYER, 65, "portable"))
    assert len(reasons) == 6
    for what in ("plan has 65.", "5000", "65", "it is 50", "expert is 50", "input is 90"):
        assert what in " ".join(reasons)
