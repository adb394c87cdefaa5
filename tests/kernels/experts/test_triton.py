"""experts and route of the standard path in Triton: any number of rows, nothing of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import LAYER, random_input, random_routes, small_k3, small_linear
from mlp_cases import assert_rounded_alike
from torch import Tensor
from triton_cases import DEVICE, Case, make_case

from kdecode.kernels.common.triton_expert_tiles import sort_pairs
from kdecode.kernels.contract import Buffers
from kdecode.kernels.experts import triton_impl as experts
from kdecode.kernels.linear.product import ProductSettings
from kdecode.kernels.route import triton_impl as route
from kdecode.model import reference
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import bit_equal

CASES = {"k3": make_case(small_k3()), "kimi-linear": make_case(small_linear())}


class Standard:
    """One op of one layer, for steps of any number of rows."""

    def __init__(self, case: Case, module: Any) -> None:
        self.buffers = Buffers()
        self.buffers.products = ProductSettings(DEVICE)
        problem = replace(case.problem(LAYER, 1), rows=None)
        assert module.refuse(problem) == []
        weights = case.packed.layers[LAYER].mlp
        self._prepared = module.prepare(problem, weights, self.buffers)

    def run(self, **inputs: Tensor) -> Buffers:
        for name, value in inputs.items():
            self.buffers[name] = value.to(DEVICE)
        self._prepared.run()
        return self.buffers


def gold(case: Case, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    parameters = case.parameters.layers[LAYER].mlp
    return reference.experts(parameters, case.config.activation, x, ids, weights, ROUNDED)


@pytest.mark.parametrize(("name", "steps"), [("k3", (70, 3, 9)), ("kimi-linear", (75,))])
def test_steps_of_any_number_of_rows(name: str, steps: tuple[int, ...]) -> None:
    case = CASES[name]
    op = Standard(case, experts)
    for rows in steps:
        source, x = random_input(case, rows)
        ids, weights = random_routes(case, rows)
        out = op.run(**{source: x}, route_ids=ids, route_weights=weights)["expert_sum"].cpu()
        assert_rounded_alike(out, gold(case, x, ids, weights), f"expert_sum of {rows} rows")


def test_ids_that_are_no_experts_and_experts_that_nobody_chose() -> None:
    """Experts 0, 5 and 11 only: several tiles of some, none of most."""
    case = CASES["k3"]
    source, x = random_input(case, 66)
    ids, weights = random_routes(case, 66)
    ids[:, 0] = torch.tensor([0, 5, 5]).repeat(22)
    ids[:, 1] = 11
    bad = ids.clone()
    bad[3, 0], bad[64, 1], bad[65, 0] = -1, case.config.moe.num_experts, 2**31 - 1
    op = Standard(case, experts)
    inputs = {source: x, "route_ids": bad, "route_weights": weights}
    out = op.run(**inputs)["expert_sum"].cpu()
    assert out[[3, 64, 65]].isnan().all()
    rest = [row for row in range(66) if row not in (3, 64, 65)]
    wanted = gold(case, x[rest], ids[rest], weights[rest])
    assert_rounded_alike(out[rest], wanted, "expert_sum")


def test_no_rows() -> None:
    case = CASES["k3"]
    source, x = random_input(case, 0)
    ids, weights = random_routes(case, 0)
    out = Standard(case, experts).run(**{source: x}, route_ids=ids, route_weights=weights)
    assert out["expert_sum"].shape == x.shape


@pytest.mark.parametrize("pairs", [5, 700, 1000])
def test_every_pair_is_in_one_tile_of_its_expert(pairs: int) -> None:
    """Two ids are no experts; larger tiles where there are more pairs an expert."""
    count = 7
    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(-1, count + 1, (pairs, 1), generator=generator).int()
    tiles = sort_pairs(ids.to(DEVICE), count)
    assert tiles.rows == {5: 16, 700: 128, 1000: 128}[pairs]
    order, bounds, ends = (t.cpu().tolist() for t in (tiles.order, tiles.bounds, tiles.ends))
    begin = 0
    for expert in range(count):
        own = order[bounds[expert] : bounds[expert + 1]]
        assert own == (ids[:, 0] == expert).nonzero().flatten().tolist()
        assert ends[expert] - begin == -(-len(own) // tiles.rows)
        begin = ends[expert]
    assert begin <= tiles.limit


def test_the_choice_is_the_torch_one() -> None:
    case = CASES["k3"]
    generator = torch.Generator().manual_seed(3)
    mlp_in = torch.randn(5, case.config.hidden_size, generator=generator).to(torch.bfloat16)
    op = Standard(case, route)
    for rows in (5, 1):
        out = op.run(mlp_in=mlp_in[:rows])
        parameters = case.parameters.layers[LAYER].mlp
        ids, weights = reference.route(parameters, case.config.moe, mlp_in[:rows], ROUNDED)
        assert out["route_ids"].dtype == torch.int32
        bit_equal(out["route_ids"].cpu(), ids, "route_ids")
        torch.testing.assert_close(out["route_weights"].cpu(), weights, rtol=1e-5, atol=0)
    empty = op.run(mlp_in=mlp_in[:0])
    assert empty["route_ids"].shape == (0, case.config.moe.top_k)
