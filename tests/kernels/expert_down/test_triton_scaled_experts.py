"""expert_up and expert_down by scaled products, in Triton, against the reference's experts.

Where there is no such instruction (the interpreter, another GPU) the same numbers are multiplied
without it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import (
    Mixture,
    block_squares,
    random_input,
    random_routes,
    small_k3,
    small_linear,
)
from torch import Tensor
from triton_cases import ARCH, Case, make_case

from kdecode.kernels.common.expert_launch import TILE_ROWS, grouped_tile
from kdecode.kernels.common.expert_products import is_scaled
from kdecode.kernels.common.expert_squares import PAIR_ROWS
from kdecode.kernels.common.tile_table import forced, recording
from kdecode.kernels.table import contract
from kdecode.testing.compare import assert_close, bit_equal

# Inputs of three and two groups of 32 columns, and of five and three.
CASES = {
    "k3": make_case(small_k3()),
    "odd": make_case(small_k3(latent_width=160, expert_width=96)),
}


def mixture(case: Case, rows: int) -> Mixture:
    return Mixture(case, ("expert_up", "expert_down"), rows, "scaled")


def close(ours: Tensor, wanted: Tensor) -> None:
    assert_close(ours, wanted, contract("expert_down").tolerance, "expert_sum")


@pytest.mark.parametrize(
    ("name", "rows"), [*(("k3", rows) for rows in range(1, 9)), ("odd", 5), ("odd", 9)]
)
def test_matches_the_reference(name: str, rows: int) -> None:
    case = CASES[name]
    found = mixture(case, rows)
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    out = found.run(**{source: x}, route_ids=ids, route_weights=weights)
    close(out["expert_sum"], found.expert_sum(x, ids, weights))


def test_which_steps_have_them() -> None:
    """A step of few rows, experts in bf16 and whoever has not asked have exact products."""
    plain, bf16 = make_case(small_linear()), make_case(small_k3(expert_format="bf16"))
    for case in (plain, bf16):
        launches = mixture(case, 9).launches
        assert [launch.constants["IS_SCALED"] for launch in launches] == [False] * 2
    for rows in (5, 64):
        for products in ("exact", "scaled"):
            ops = ("expert_up", "expert_down")
            launches = Mixture(CASES["k3"], ops, rows, products).launches
            wanted = products == "scaled"
            assert [launch.constants["IS_SCALED"] for launch in launches] == [wanted] * 2
    few = mixture(CASES["k3"], PAIR_ROWS).launches
    assert [launch.kernel.fn.__name__ for launch in few] == ["expert_up_pairs", "expert_down_rows"]
    assert not is_scaled("scaled", True, PAIR_ROWS)
    assert not is_scaled("scaled", False, 64)


def test_differs_from_exact_products_by_a_rounding_at_most() -> None:
    """One bf16 number, where two sums lie on two sides of what is between two of them."""
    case, rows = CASES["odd"], 6
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    ops = ("expert_up", "expert_down")
    exact, ours = (
        Mixture(case, ops, rows, products).run(**{source: x}, route_ids=ids, route_weights=weights)
        for products in ("exact", "scaled")
    )
    wanted, found = exact["expert_product"].float(), ours["expert_product"].float()
    assert torch.all((found - wanted).abs() <= 2.0**-6 * wanted.abs() + 1e-6)
    assert (found == wanted).float().mean() > 0.98


@pytest.mark.parametrize(
    ("change", "words"),
    [({"block_n": 64}, "with 64 columns and"), ({"block_k": 128}, "rounds of 128 of 96 inputs")],
)
def test_tiles_without_scaled_products_are_refused(change: dict[str, int], words: str) -> None:
    """The tuner goes past them."""
    with recording() as asked:
        mixture(CASES["k3"], 5)
    tiles = {key: replace(tile, **change) for key, tile in asked.items()}
    with forced(tiles), pytest.raises(ValueError, match=words):
        grouped_tile("expert_up", ARCH, 96, 128, True, TILE_ROWS, is_scaled=True)


def test_64_rows_of_which_many_choose_one_expert() -> None:
    """Expert 7 is everybody's: four tiles of rows; the others are 0 to 3."""
    case = CASES["k3"]
    source, x = random_input(case, 64)
    ids, weights = random_routes(case, 64)
    ids[:, 1] = 7
    ids[:, 0] = torch.arange(64) % 4
    found = mixture(case, 64)
    out = found.run(**{source: x}, route_ids=ids, route_weights=weights)
    close(out["expert_sum"], found.expert_sum(x, ids, weights))


def test_what_is_wrong_with_a_row_stays_in_it() -> None:
    """Ids that are no experts, inputs that are no numbers; nothing is left for the next run."""
    case, rows = CASES["k3"], 7
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    found = mixture(case, rows)
    bad, hurt = ids.clone(), x.clone()
    bad[0, 1], bad[2, 0], bad[2, 1] = -1, case.config.moe.num_experts, 2**31 - 1
    hurt[4, 3], hurt[5, 3], hurt[6, 90] = float("nan"), float("inf"), float("-inf")
    wrong = found.run(**{source: hurt}, route_ids=bad, route_weights=weights)["expert_sum"]
    clean = found.run(**{source: x}, route_ids=ids, route_weights=weights)["expert_sum"]
    close(clean, found.expert_sum(x, ids, weights))
    assert wrong[[0, 2, 4, 5, 6]].isnan().all()
    bit_equal(wrong[[1, 3]], clean[[1, 3]], "expert_sum")


def test_a_row_does_not_depend_on_the_others() -> None:
    case, rows, fewer = CASES["k3"], 9, 6
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    together = mixture(case, rows).run(**{source: x}, route_ids=ids, route_weights=weights)
    part = slice(rows - fewer, rows)
    alone = mixture(case, fewer).run(
        **{source: x[part]}, route_ids=ids[part], route_weights=weights[part]
    )
    for name in ("expert_product", "expert_sum"):
        bit_equal(alone[name], together[name][part], name)


def test_squares_are_of_the_sums_as_they_are_read() -> None:
    case, rows = CASES["odd"], 6
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    out = mixture(case, rows).run(**{source: x}, route_ids=ids, route_weights=weights)
    wanted = block_squares(case.config, out["expert_sum"])
    torch.testing.assert_close(out["expert_squares"], wanted, rtol=1e-5, atol=0)
