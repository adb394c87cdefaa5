"""The native first half of a mixture of experts against the reference stages that it covers."""

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
    fill_residual,
    latent_config,
    make_buffers,
    make_case,
    plain_config,
    prepare,
)

from kdecode.kernels.moe_front.cpu import refuse
from kdecode.kernels.moe_front.op import CONTRACT
from kdecode.model import reference
from kdecode.model.reference import GOLD, ROUNDED
from kdecode.testing.compare import assert_close, bit_equal

# Layer 3 sees the snapshots pushed before layers 0 and 2; the third stays poisoned.
NUM_SNAPSHOTS = 2
CASES = {
    "latent": make_case(latent_config("bf16")),
    "plain": make_case(plain_config()),
    "no shared experts": make_case(plain_config(num_shared=0)),
}


def run(case, rows, pool, isa, seed=1):
    buffers = make_buffers(case.config, rows, pool)
    fill_residual(case, buffers, NUM_SNAPSHOTS, seed)
    prepare(case, "moe_front", MOE_LAYER, buffers, isa).run()
    return buffers


def mix_and_norm(case, buffers, rounding):
    layer, eps = case.layer(MOE_LAYER), case.config.rms_eps
    snapshots = buffers["snapshots"][:NUM_SNAPSHOTS] if "snapshots" in buffers else torch.empty(0)
    mix = reference.mlp_mix(layer.mlp_mix, buffers["prefix"], snapshots, eps, rounding)
    return {"mlp_mix": mix, "mlp_in": reference.mlp_norm(mix, layer.post_norm, eps, rounding)}


def products(case, mlp_in, rounding):
    """What the step makes of its normed input, but for the route."""
    moe, found = case.moe(), {}
    if moe.latent_down is not None:
        found["latent"] = reference.latent_down(moe, mlp_in, rounding)
    if moe.shared is not None:
        gate = reference.linear(mlp_in, moe.shared.gate_proj, rounding)
        up = reference.linear(mlp_in, moe.shared.up_proj, rounding)
        product = reference.activate(gate, up, case.config.activation, rounding)
        found["shared_product"] = product
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_matches_the_reference(name, rows, pool, isa):
    case = CASES[name]
    buffers = run(case, rows, pool, isa)
    gold = mix_and_norm(case, buffers, GOLD)
    for buffer, value in (gold | products(case, gold["mlp_in"], GOLD)).items():
        assert_close(buffers[buffer], value, CONTRACT.tolerance, buffer)
    rounded = mix_and_norm(case, buffers, ROUNDED) | products(case, buffers["mlp_in"], ROUNDED)
    for buffer, value in rounded.items():
        assert_rounded_alike(buffers[buffer], value, buffer)
    ids, weights = reference.route(case.moe(), case.config.moe, buffers["mlp_in"], ROUNDED)
    assert torch.equal(buffers["route_ids"], ids)
    torch.testing.assert_close(buffers["route_weights"], weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(name, pool, two_threads, isa):
    case = CASES[name]
    together = run(case, 8, two_threads, isa)
    alone = make_buffers(case.config, 1, pool)
    alone["prefix"].copy_(together["prefix"][7:])
    if "snapshots" in alone:
        alone["snapshots"].copy_(together["snapshots"][:, 7:])
    prepare(case, "moe_front", MOE_LAYER, alone, isa).run()
    for buffer in CONTRACT.writes:
        if buffer in alone:
            bit_equal(alone[buffer][0], together[buffer][7], buffer)


def route_case(router, bias, **settings):
    """A plain case with this router; only the route is looked at."""
    case = CASES["no shared experts"]
    config = replace(case.config, moe=replace(case.config.moe, **settings))
    moe = replace(case.moe(), router=router, router_bias=bias)
    layers = list(case.parameters.layers)
    layers[MOE_LAYER] = replace(layers[MOE_LAYER], mlp=moe)
    return replace(case, config=config, parameters=replace(case.parameters, layers=tuple(layers)))


def test_of_equal_scores_the_lowest_experts_are_chosen(pool, isa):
    width = CASES["plain"].config.hidden_size
    bias = torch.zeros(NUM_EXPERTS)
    bias[[20, 3, 9]] = torch.tensor([0.25, 0.25, 0.5])
    case = route_case(torch.zeros(NUM_EXPERTS, width).to(torch.bfloat16), bias)
    buffers = run(case, 3, pool, isa)
    assert buffers["route_ids"].tolist() == [[9, 3, 20, 0, 1]] * 3
    gold = torch.full((3, TOP_K), case.config.moe.routed_scaling / TOP_K)
    torch.testing.assert_close(buffers["route_weights"], gold, rtol=1e-6, atol=0)


def test_weights_come_from_the_unbiased_scores(pool, isa):
    """A bias of 12 swallows sigmoids below 1e-7: every biased score is 12, the weights are not."""
    width = CASES["plain"].config.hidden_size
    steps = torch.linspace(1.0, 1.5, NUM_EXPERTS).flip(0)
    router = (-0.2 * steps[:, None]).expand(NUM_EXPERTS, width).to(torch.bfloat16)
    case = route_case(router, torch.full((NUM_EXPERTS,), 12.0), routed_scaling=1.0)
    buffers = make_buffers(case.config, 2, pool)
    buffers["prefix"].fill_(1.0)
    prepare(case, "moe_front", MOE_LAYER, buffers, isa).run()
    scores = torch.sigmoid(buffers["mlp_in"].double() @ router.double().T)
    assert scores.max() < 1e-7
    assert buffers["route_ids"].tolist() == [list(range(TOP_K))] * 2
    chosen = scores[:, :TOP_K]
    gold = (chosen / chosen.sum(-1, keepdim=True)).float()
    assert gold.max() > 1.5 * gold.min()
    torch.testing.assert_close(buffers["route_weights"], gold, rtol=1e-4, atol=0)
    torch.testing.assert_close(buffers["route_weights"].sum(-1), torch.ones(2))


@pytest.mark.parametrize(("top_k", "is_renormalized"), [(1, True), (NUM_EXPERTS, True), (4, False)])
def test_any_number_of_experts_and_no_renormalisation(top_k, is_renormalized, pool, isa):
    moe = CASES["plain"].moe()
    case = route_case(moe.router, moe.router_bias, top_k=top_k, is_renormalized=is_renormalized)
    buffers = run(case, 2, pool, isa)
    ids, weights = reference.route(moe, case.config.moe, buffers["mlp_in"], ROUNDED)
    assert torch.equal(buffers["route_ids"], ids)
    torch.testing.assert_close(buffers["route_weights"], weights, rtol=1e-5, atol=0)


def test_a_row_of_nan_has_valid_experts_and_harms_no_other(pool, isa):
    case = CASES["latent"]
    clean = run(case, 3, pool, isa)
    buffers = make_buffers(case.config, 3, pool)
    fill_residual(case, buffers, NUM_SNAPSHOTS)
    buffers["prefix"][1, 5] = float("nan")
    prepare(case, "moe_front", MOE_LAYER, buffers, isa).run()
    assert buffers["route_ids"][1].tolist() == list(range(TOP_K))
    assert buffers["route_weights"][1].isnan().all()
    for buffer in CONTRACT.writes:
        bit_equal(buffers[buffer][[0, 2]], clean[buffer][[0, 2]], buffer)


def test_refuses_with_every_reason():
    case = CASES["latent"]
    assert refuse(case.problem(MOE_LAYER, 64, "portable")) == []
    moe = replace(case.config.moe, num_experts=5000, top_k=65, expert_width=50)
    config = replace(case.config, moe=moe, hidden_size=107, attn_res_block=1)
    config = replace(config, layer_kinds=("kda",) * 64, mlp_kinds=("moe",) * 64)
    reasons = " ".join(refuse(replace(case, config=config).problem(MOE_LAYER, 65, "portable")))
    for what in ("plan has 65.", "64.", "107", "5000", "65", "100"):
        assert what in reasons
