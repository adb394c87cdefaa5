"""expert_up and expert_down in Triton against the reference's experts, pair by pair and grouped."""

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
    wide_tiles,
)
from mlp_cases import assert_rounded_alike
from triton_cases import Case, Chain, Use, decode_step, make_case, verify_step

from kdecode.kernels.common.expert_launch import grouped_places, pair_tile
from kdecode.kernels.common.expert_squares import PAIR_COLUMNS, PAIR_ROWS, num_squares
from kdecode.kernels.common.tile_table import forced, recording
from kdecode.kernels.common.triton_product import FEW_ROWS
from kdecode.testing.compare import bit_equal

CASES = {
    "k3": make_case(small_k3()),
    "bf16 latents": make_case(small_k3(expert_format="bf16", latent_width=90)),
    "kimi-linear": make_case(small_linear()),
}
OPS = ("expert_up", "expert_down")


def mixture(case: Case, rows: int) -> Mixture:
    return Mixture(case, OPS, rows)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("k3", 3), ("k3", 5), ("k3", 9), ("bf16 latents", 6), ("kimi-linear", 1), ("kimi-linear", 9)],
)
def test_matches_the_reference(name: str, rows: int) -> None:
    """Pairs by themselves, grouped by pair, grouped by expert."""
    case = CASES[name]
    found = mixture(case, rows)
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    out = found.run(**{source: x}, route_ids=ids, route_weights=weights)
    assert_rounded_alike(out["expert_sum"], found.expert_sum(x, ids, weights), "expert_sum")


def test_every_kind_of_grid_is_tested() -> None:
    config = CASES["k3"].config
    assert 3 <= PAIR_ROWS < 5
    assert grouped_places(config, 5) == (10, True)
    assert grouped_places(config, 9) == (13, False)


def test_in_the_forward() -> None:
    case, uses = CASES["k3"], [Use("expert_up", 2), Use("expert_down", 2)]
    chain = wide_tiles(lambda: Chain(case, uses, rows=2))
    chain.check(decode_step([5, 0]))
    chain.check(decode_step([1, 17], turn=1), seed=1)
    chain = wide_tiles(lambda: Chain(case, uses, rows=6, each=3))
    chain.check(verify_step([5, 9], 3))


def test_64_rows_of_which_many_choose_one_expert() -> None:
    """Expert 7 is everybody's: four tiles of rows; the others are 0 to 3."""
    case = CASES["k3"]
    source, x = random_input(case, 64)
    ids, weights = random_routes(case, 64)
    ids[:, 1] = 7
    ids[:, 0] = torch.arange(64) % 4
    found = mixture(case, 64)
    out = found.run(**{source: x}, route_ids=ids, route_weights=weights)
    assert_rounded_alike(out["expert_sum"], found.expert_sum(x, ids, weights), "expert_sum")


@pytest.mark.parametrize("rows", [2, 6])
def test_one_expert_in_every_slot(rows: int) -> None:
    case = CASES["k3"]
    source, x = random_input(case, rows)
    ids = torch.full((rows, case.config.moe.top_k), case.config.moe.num_experts - 1).int()
    weights = random_routes(case, rows)[1]
    found = mixture(case, rows)
    out = found.run(**{source: x}, route_ids=ids, route_weights=weights)
    assert_rounded_alike(out["expert_sum"], found.expert_sum(x, ids, weights), "expert_sum")


@pytest.mark.parametrize("rows", [3, 6])
def test_what_is_wrong_with_a_row_stays_in_it(rows: int) -> None:
    """Ids that are no experts, and inputs that are NaN; nothing is left for the next run."""
    case = CASES["k3"]
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    found = mixture(case, rows)
    bad, hurt = ids.clone(), x.clone()
    bad[0, 1], bad[2, 0], bad[2, 1] = -1, case.config.moe.num_experts, 2**31 - 1
    hurt[4:, 3] = float("nan")
    wrong = found.run(**{source: hurt}, route_ids=bad, route_weights=weights)["expert_sum"]
    clean = found.run(**{source: x}, route_ids=ids, route_weights=weights)["expert_sum"]
    assert_rounded_alike(clean, found.expert_sum(x, ids, weights), "expert_sum")
    rest = [1, 3] if rows > 3 else [1]
    assert wrong[[row for row in range(rows) if row not in rest]].isnan().all()
    bit_equal(wrong[rest], clean[rest], "expert_sum")


@pytest.mark.parametrize(("rows", "fewer"), [(3, 1), (9, 6)])
def test_a_row_does_not_depend_on_the_others(rows: int, fewer: int) -> None:
    case = CASES["k3"]
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    together = mixture(case, rows).run(**{source: x}, route_ids=ids, route_weights=weights)
    part = slice(rows - fewer, rows)
    alone = mixture(case, fewer).run(
        **{source: x[part]}, route_ids=ids[part], route_weights=weights[part]
    )
    for name in ("expert_product", "expert_sum"):
        bit_equal(alone[name], together[name][part], name)


@pytest.mark.parametrize(
    ("name", "rows"), [("k3", 3), ("k3", 6), ("k3", 17), ("bf16 latents", 4), ("bf16 latents", 5)]
)
def test_squares_are_of_the_sums_as_they_are_read(name: str, rows: int) -> None:
    """Of one of 8 or 64 columns a block, the last block not full, and of a row that is NaN."""
    case = CASES[name]
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    ids[1, 1] = -1
    out = mixture(case, rows).run(**{source: x}, route_ids=ids, route_weights=weights)
    wanted = block_squares(case.config, out["expert_sum"])
    assert wanted[:, 1].isnan().all()
    torch.testing.assert_close(out["expert_squares"], wanted, rtol=1e-5, atol=0, equal_nan=True)


def test_who_has_no_use_for_squares_makes_none() -> None:
    """Rows that are normalised whole, sums that are not normalised."""
    config = CASES["k3"].config
    plain = small_k3(has_latent_norm=False)
    found = {rows: num_squares(config, rows) for rows in (1, FEW_ROWS, FEW_ROWS + 1, 4, 5, 64)}
    assert found == {1: 0, 2: 0, 3: 12, 4: 12, 5: 2, 64: 2}
    assert num_squares(plain, 64) == num_squares(CASES["kimi-linear"].config, 64) == 0
    assert "expert_squares" not in mixture(CASES["kimi-linear"], 9).buffers


def test_tiles_without_whole_blocks_are_refused() -> None:
    """The tuner goes past them: expert_squares would be other numbers."""
    case = CASES["k3"]
    with recording() as asked:
        Chain(case, [Use("expert_down", 2)], rows=8)
    (key,) = asked
    narrow = {key: replace(asked[key], block_n=32)}
    with forced(narrow), pytest.raises(ValueError, match="have 32 columns"):
        Chain(case, [Use("expert_down", 2)], rows=8)


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("inner", [192, 384, 768, 3072])
def test_default_tiles_of_pairs_have_whole_blocks(inner: int, is_coded: bool) -> None:
    tile = pair_tile("expert_down", "sm_90", inner, 3584, is_coded, 16, has_squares=True)
    assert (tile.block_n, tile.warps <= 8) == (PAIR_COLUMNS, True)
    size = tile.block_n * tile.block_k * 16
    assert size <= 8 * (1 << 13 if is_coded else 1 << 11)
