"""expert_down in Triton on one of several ranks: its parts of two sums, neither of them rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import LAYER, random_routes, small_k3, small_linear, wide_tiles
from rank_cases import OneOfSeveral
from torch import Tensor
from triton_cases import Case, linear_config, make_case

from kdecode.kernels.expert_down.triton_impl import prepare, refuse
from kdecode.model.mxfp4 import dequantise
from kdecode.model.parameters import MoeParameters, Mxfp4
from kdecode.testing.compare import bit_equal

CASES = {
    "k3": make_case(small_k3()),
    "bf16 latents": make_case(small_k3(expert_format="bf16", latent_width=90)),
    "kimi-linear": make_case(small_linear()),
    "no shared experts": make_case(linear_config(num_shared=0)),
}


def mixture(case: Case) -> MoeParameters:
    mlp = case.parameters.layers[LAYER].mlp
    assert isinstance(mlp, MoeParameters)
    return mlp


def expert_part(case: Case, product: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """In fp64; an id that is no expert makes its row NaN."""
    downs = [dequantise(w) if isinstance(w, Mxfp4) else w for w in mixture(case).w2]
    total = torch.zeros(product.shape[0], downs[0].shape[0], dtype=torch.float64)
    for row, slots in enumerate(ids.tolist()):
        for slot, expert in enumerate(slots):
            if not 0 <= expert < len(downs):
                total[row] = float("nan")
                continue
            out = downs[expert].double() @ product[row, slot].double()
            total[row] += float(weights[row, slot]) * out
    return total


def assert_part(part: Tensor, gold: Tensor) -> None:
    """As close as sums in fp32 are, and not rounded to bf16."""
    assert part.dtype == torch.float32
    torch.testing.assert_close(part.double(), gold, rtol=1e-4, atol=1e-4, equal_nan=True)
    sound = part[~part.isnan()]
    assert not torch.equal(sound, sound.bfloat16().float())


def prepared(case: Case, rows: int) -> tuple[OneOfSeveral, Any]:
    """On rank 0 of two."""
    ours = OneOfSeveral(case, 2, rows)
    problem = ours.problem(LAYER)
    assert refuse(problem) == []
    return ours, wide_tiles(lambda: prepare(problem, case.packed.layers[LAYER], ours.buffers))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
def test_matches_the_reference(name: str, rows: int) -> None:
    """Pairs by themselves and grouped; one row or two by fp32 products, more by tensor cores. A
    second run finds the counters as the first one did."""
    ours, step = prepared(CASES[name], rows)
    for seed in (0, 1):
        check(step, ours, seed)


def check(step: Any, ours: OneOfSeveral, seed: int, bad: int | None = None) -> None:
    """bad: a row whose first id is no expert."""
    case, shared = ours.case, mixture(ours.case).shared
    ours.poison()
    ids, weights = random_routes(case, ours.rows, seed)
    if bad is not None:
        ids[bad, 0] = case.config.moe.num_experts
    ours.buffers["route_ids"].copy_(ids)
    ours.buffers["route_weights"].copy_(weights)
    product = ours.fill("expert_product", seed + 2)
    source = None if shared is None else ours.fill("shared_product", seed + 3)
    step.run()
    assert_part(ours.buffers["expert_part"].cpu(), expert_part(case, product, ids, weights))
    # What the other rank has given is its own.
    assert ours.parts["expert_part"][1].isnan().all()
    if shared is not None and source is not None:
        part = ours.buffers["shared_part"].cpu()
        assert_part(part, source.double() @ shared.down_proj.double().T)
        assert ours.parts["shared_part"][1].isnan().all()


def test_sixty_four_rows() -> None:
    ours, step = prepared(CASES["k3"], 64)
    check(step, ours, 0)


@pytest.mark.parametrize("rows", [3, 6])
def test_what_is_wrong_with_a_row_stays_in_it(rows: int) -> None:
    ours, step = prepared(CASES["k3"], rows)
    check(step, ours, 0, bad=1)


def test_a_row_has_the_same_shared_part_whatever_its_neighbours() -> None:
    parts = {}
    for rows in (3, 8):
        ours, step = prepared(CASES["k3"], rows)
        ours.poison()
        ids, weights = random_routes(ours.case, 8)
        ours.buffers["route_ids"].copy_(ids[:rows])
        ours.buffers["route_weights"].copy_(weights[:rows])
        ours.fill("expert_product", 1)
        ours.buffers["shared_product"].fill_(0.5)
        step.run()
        parts[rows] = ours.buffers["shared_part"].cpu()
    bit_equal(parts[3], parts[8][:3], "shared_part")


@pytest.mark.parametrize(
    ("name", "grid"), [("k3", (2, 4)), ("kimi-linear", (3, 3)), ("no shared experts", (3, 2))]
)
def test_lines_of_programs_in_front_are_as_many_as_needed(name: str, grid: tuple[int, int]) -> None:
    """160 columns in blocks of 64 are three programs, in lines of two or three of them."""
    _, step = prepared(CASES[name], 2)
    assert step.launch.grid == grid
