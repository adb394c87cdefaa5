"""moe_gate in Triton: products of the normed input, and the choice of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import LAYER, Mixture, small_k3, small_linear, wide_tiles
from mlp_cases import assert_rounded_alike
from triton_cases import Case, Chain, Use, decode_step, linear_config, make_case

from kdecode.kernels.moe_gate.op import CONTRACT
from kdecode.kernels.moe_gate.triton_impl import SELECT_ROWS, refuse
from kdecode.model import reference
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import bit_equal

CASES = {
    "k3": make_case(small_k3()),
    "kimi-linear": make_case(small_linear()),
    "no shared experts": make_case(linear_config(num_shared=0)),
}


def random_rows(case: Case, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, case.config.hidden_size, generator=generator).to(torch.bfloat16)


def check_route(found: Mixture, out: dict[str, torch.Tensor], mlp_in: torch.Tensor) -> None:
    moe = found.case.config.moe
    ids, weights = reference.route(found.parameters, moe, mlp_in, ROUNDED)
    assert torch.equal(out["route_ids"], ids)
    torch.testing.assert_close(out["route_weights"], weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 3])
def test_matches_the_reference(name: str, rows: int) -> None:
    """A second run finds the counters as the first one did."""
    case = CASES[name]
    found = Mixture(case, ("moe_gate",), rows)
    for seed in (0, 1):
        mlp_in = random_rows(case, rows, seed)
        out = found.run(mlp_in=mlp_in)
        check_route(found, out, mlp_in)
        if case.config.moe.latent_width is not None:
            latent = reference.latent_down(found.parameters, mlp_in, ROUNDED)
            assert_rounded_alike(out["latent"], latent, "latent")
        if case.config.moe.num_shared:
            product = found.shared_product(mlp_in)
            assert_rounded_alike(out["shared_product"], product, "shared_product")


def test_in_the_forward() -> None:
    chain = wide_tiles(lambda: Chain(CASES["k3"], [Use("moe_gate", 2)], rows=2))
    chain.check(decode_step([5, 0]))
    chain.check(decode_step([1, 17], turn=1), seed=1)


def test_64_rows() -> None:
    case = CASES["no shared experts"]
    found, mlp_in = Mixture(case, ("moe_gate",), 64), random_rows(case, 64)
    check_route(found, found.run(mlp_in=mlp_in), mlp_in)


def route_case(router: torch.Tensor, bias: torch.Tensor, **settings: object) -> Case:
    """A case whose layer has this router."""
    case = CASES["no shared experts"]
    config = replace(case.config, moe=replace(case.config.moe, **settings))
    moe = replace(case.parameters.layers[LAYER].mlp, router=router, router_bias=bias)
    layers, packed = list(case.parameters.layers), list(case.packed.layers)
    layers[LAYER] = replace(layers[LAYER], mlp=moe)
    mlp = packed[LAYER].mlp
    device = mlp.router_bias.device
    matrix = replace(mlp.router, data=router.to(device))
    mlp = replace(mlp, router=matrix, router_bias=bias.to(device))
    packed[LAYER] = replace(packed[LAYER], mlp=mlp)
    return replace(
        case,
        config=config,
        parameters=replace(case.parameters, layers=tuple(layers)),
        packed=replace(case.packed, layers=tuple(packed)),
    )


@pytest.mark.parametrize("rows", [2, 3])
def test_of_equal_scores_the_lowest_experts_are_chosen(rows: int) -> None:
    """By the last program, and by a launch of its own."""
    assert SELECT_ROWS == 2
    case = CASES["no shared experts"]
    moe, width = case.config.moe, case.config.hidden_size
    bias = torch.zeros(moe.num_experts)
    bias[[20, 3, 9]] = torch.tensor([0.25, 0.25, 0.5])
    case = route_case(torch.zeros(moe.num_experts, width).to(torch.bfloat16), bias)
    out = Mixture(case, ("moe_gate",), rows).run(mlp_in=random_rows(case, rows))
    assert out["route_ids"].tolist() == [[9, 3, 20, 0, 1]] * rows
    gold = torch.full((rows, moe.top_k), moe.routed_scaling / moe.top_k)
    torch.testing.assert_close(out["route_weights"], gold, rtol=1e-6, atol=0)


def test_negative_scores_and_minus_zero() -> None:
    """Biased scores on either side of zero, and a pair of zeros of both signs."""
    case = CASES["no shared experts"]
    moe, width = case.config.moe, case.config.hidden_size
    bias = torch.linspace(-1, -0.25, moe.num_experts)
    bias[[5, 11]] = -0.5
    case = route_case(torch.zeros(moe.num_experts, width).to(torch.bfloat16), bias, top_k=24)
    out = Mixture(case, ("moe_gate",), 1).run(mlp_in=random_rows(case, 1))
    wanted = torch.sort(0.5 + bias, descending=True, stable=True).indices
    assert out["route_ids"][0].tolist() == wanted.tolist()


def test_weights_come_from_the_unbiased_scores() -> None:
    """A bias of 12 swallows sigmoids below 1e-7: every biased score is 12, the weights are not."""
    case = CASES["no shared experts"]
    moe, width = case.config.moe, case.config.hidden_size
    steps = torch.linspace(1.0, 1.5, moe.num_experts).flip(0)
    router = (-0.13 * steps[:, None]).expand(moe.num_experts, width).to(torch.bfloat16)
    case = route_case(router.contiguous(), torch.full((moe.num_experts,), 12.0))
    mlp_in = torch.ones(1, width).to(torch.bfloat16)
    out = Mixture(case, ("moe_gate",), 1).run(mlp_in=mlp_in)
    scores = torch.sigmoid(mlp_in.double() @ router.double().T)[:, : moe.top_k]
    assert scores.max() < 1e-7
    assert out["route_ids"].tolist() == [list(range(moe.top_k))]
    gold = (scores / scores.sum(-1, keepdim=True)).float() * moe.routed_scaling
    assert gold.max() > 1.5 * gold.min()
    torch.testing.assert_close(out["route_weights"], gold, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("top_k", "is_renormalized"), [(1, True), (24, True), (4, False)])
def test_any_number_of_experts_and_no_renormalisation(top_k: int, is_renormalized: bool) -> None:
    mlp = CASES["no shared experts"].parameters.layers[LAYER].mlp
    case = route_case(mlp.router, mlp.router_bias, top_k=top_k, is_renormalized=is_renormalized)
    found, mlp_in = Mixture(case, ("moe_gate",), 1), random_rows(case, 1)
    check_route(found, found.run(mlp_in=mlp_in), mlp_in)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_row_of_nan_has_valid_experts_and_harms_no_other(rows: int) -> None:
    case = CASES["k3"]
    found, mlp_in = Mixture(case, ("moe_gate",), rows), random_rows(case, rows)
    clean = found.run(mlp_in=mlp_in)
    mlp_in[1] = float("nan")
    out = found.run(mlp_in=mlp_in)
    assert out["route_ids"][1].tolist() == list(range(case.config.moe.top_k))
    assert out["route_weights"][1].isnan().all()
    rest = [row for row in range(rows) if row != 1]
    for name in CONTRACT.writes:
        bit_equal(out[name][rest], clean[name][rest], name)


def test_refuses_with_every_reason() -> None:
    case = CASES["k3"]
    assert refuse(case.problem(LAYER, 64)) == []
    moe = replace(case.config.moe, num_experts=5000, top_k=65)
    problem = replace(case, config=replace(case.config, moe=moe)).problem(LAYER, 65)
    reasons = " ".join(refuse(problem))
    for what in ("this has 65", "4096", "5000", "selects 65"):
        assert what in reasons
