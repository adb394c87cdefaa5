"""rank_whole in Triton against what one rank would have, of the parts that all ranks have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import LAYER, small_k3, small_linear, wide_tiles
from rank_cases import OneOfSeveral, sum_of
from torch import Tensor
from triton_cases import Case, linear_config, make_case

from kdecode.kernels.common.rank_parts import Place
from kdecode.kernels.rank_whole.op import WholeUse, contract_at
from kdecode.kernels.rank_whole.triton_impl import prepare, refuse
from kdecode.model import reference
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close, bit_equal

CASES = {
    "k3": make_case(small_k3()),
    "no norm": make_case(small_k3(has_latent_norm=False)),
    "kimi-linear": make_case(small_linear()),
    "no shared experts": make_case(linear_config(num_shared=0)),
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 64)


class Whole:
    """The launch of one place, on rank 0 of ``size``."""

    def __init__(self, case: Case, place: Place, rows: int, size: int) -> None:
        self.ours = OneOfSeveral(case, size, rows)
        use = WholeUse(place, None if place == "head" else case.packed.layers[LAYER].mlp)
        problem = self.ours.problem(None if place == "head" else LAYER)
        assert refuse(problem) == []
        self.step: Any = wide_tiles(lambda: prepare(problem, use, self.ours.buffers))

    def run(self) -> dict[str, Tensor]:
        self.step.run()
        return {name: tensor.cpu() for name, tensor in self.ours.buffers.items()}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "size"), [("k3", 4), ("kimi-linear", 2)])
def test_the_choice_is_that_of_the_whole_router(name: str, size: int, rows: int) -> None:
    case = CASES[name]
    made = Whole(case, "gate", rows, size)
    made.ours.poison()
    scores = torch.sigmoid(torch.cat(made.ours.give("router_part", rows), dim=1))
    moe, mlp = case.config.moe, case.parameters.layers[LAYER].mlp
    biased = scores + mlp.router_bias  # type: ignore[union-attr]
    ids = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    weights = scores.gather(1, ids)
    total = weights.sum(-1, keepdim=True) if moe.is_renormalized else 1.0
    weights = weights / total * moe.routed_scaling
    latents = made.ours.give("latent_part", 1) if moe.latent_width else []
    out = made.run()
    assert torch.equal(out["route_ids"], ids.int())
    torch.testing.assert_close(out["route_weights"], weights, rtol=1e-5, atol=0)
    if latents:
        bit_equal(out["latent"], torch.cat(latents, dim=1), "latent")


@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_added_in_order_and_normalised(rows: int) -> None:
    check_sums("k3", rows, 4)


@pytest.mark.parametrize("name", ["no norm", "kimi-linear", "no shared experts"])
def test_models_without_some_of_it(name: str) -> None:
    check_sums(name, 3, 2)


def check_sums(name: str, rows: int, size: int) -> None:
    """A second run finds the counters as the first one did."""
    case = CASES[name]
    made = Whole(case, "experts", rows, size)
    norm = case.parameters.layers[LAYER].mlp.latent_norm  # type: ignore[union-attr]
    for seed in (0, 10):
        made.ours.poison()
        expert_sum = sum_of(made.ours.give("expert_part", seed))
        has_shared = bool(case.config.moe.num_shared)
        shared = sum_of(made.ours.give("shared_part", seed + 1)) if has_shared else None
        out = made.run()
        bit_equal(out["expert_sum"], expert_sum, "expert_sum")
        if shared is not None:
            bit_equal(out["shared"], shared, "shared")
        if norm is not None:
            normed = reference.rms_norm(expert_sum, norm, case.config.rms_eps, ROUNDED)
            tolerance = contract_at("experts").tolerance
            assert_close(out["expert_normed"], normed, tolerance, "expert_normed")


@pytest.mark.parametrize("rows", [1, 5])
def test_logits_are_put_side_by_side(rows: int) -> None:
    made = Whole(CASES["k3"], "head", rows, 4)
    made.ours.poison()
    parts = made.ours.give("logits_part", 0)
    bit_equal(made.run()["logits"], torch.cat(parts, dim=1).float(), "logits")
