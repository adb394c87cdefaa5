"""moe_gate in Triton on ranks that signal each other: products, signals, and the choice of all.

A rank waits for the others in the middle of the launch, so that each is a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import LAYER, small_k3, small_linear, wide_tiles
from forked_ranks import FORKED, LIMIT_S, run_apart
from mlp_cases import assert_rounded_alike
from peers_here import blocks_here
from rank_cases import OneOfSeveral
from rank_cuts import divisible, rank_case
from torch import Tensor
from triton_cases import DEVICE, Case, make_case

from kdecode.kernels.common.peer_table import LATE
from kdecode.kernels.moe_gate.triton_impl import SELECT_ROWS, prepare, refuse
from kdecode.model import reference
from kdecode.model.reference import ROUNDED
from kdecode.parallel.ranks import Ranks

pytestmark = pytest.mark.interpreter

SIZE = 2
NAMES = ("route_ids", "route_weights", "latent", "shared_product")
CASES = {
    "k3": make_case(divisible(small_k3())),
    "kimi-linear": make_case(divisible(small_linear())),
}


class Gates:
    """The launch of every rank, prepared before they part."""

    def __init__(self, case: Case, rows: int) -> None:
        self.case, self.rows = case, rows
        self.blocks = blocks_here(SIZE, DEVICE, is_shared=True, limit_ms=int(1000 * LIMIT_S))
        self.ranks = [self._rank(rank) for rank in range(SIZE)]
        self.barrier = FORKED.Barrier(SIZE)

    def _rank(self, rank: int) -> tuple[OneOfSeveral, Any]:
        share = rank_case(self.case, Ranks(rank, SIZE))
        ours = OneOfSeveral(share, SIZE, self.rows, rank, self.blocks[rank])
        problem = ours.problem(LAYER)
        assert refuse(problem) == []
        step = wide_tiles(lambda: prepare(problem, share.packed.layers[LAYER], ours.buffers))
        return ours, step

    def run(self, inputs: list[Tensor]) -> list[list[dict[str, Tensor]]]:
        """By rank and turn, what the launch leaves."""
        return run_apart([lambda r=rank: self._turns(r, inputs) for rank in range(SIZE)])

    def _turns(self, rank: int, inputs: list[Tensor]) -> list[dict[str, Tensor]]:
        ours, step = self.ranks[rank]
        found = []
        for mlp_in in inputs:
            # A plan has other exchanges between two uses of a block.
            self.barrier.wait(LIMIT_S)
            ours.poison()
            ours.buffers["mlp_in"].copy_(mlp_in)
            step.run()
            found.append({n: ours.buffers[n].clone() for n in NAMES if n in ours.buffers})
        assert not self.blocks[rank].fault[LATE:].any()
        return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_every_rank_chooses_among_the_experts_of_all(name: str, rows: int) -> None:
    """By the last program, and by a program a row. A second turn finds counters and signals as the
    first one did."""
    assert SELECT_ROWS == 2
    check(CASES[name], rows, turns=2)


def test_sixty_four_rows() -> None:
    check(CASES["k3"], 64, turns=1)


def check(case: Case, rows: int, turns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, case.config.hidden_size)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for _ in range(turns)]
    found = Gates(case, rows).run(inputs)
    moe, mlp = case.config.moe, case.parameters.layers[LAYER].mlp
    for turn, mlp_in in enumerate(inputs):
        ids, weights = reference.route(mlp, moe, mlp_in, ROUNDED)  # type: ignore[arg-type]
        for outs in found:
            out = outs[turn]
            assert torch.equal(out["route_ids"], ids)
            torch.testing.assert_close(out["route_weights"], weights, rtol=1e-5, atol=0)
            if moe.latent_width is not None:
                latent = reference.latent_down(mlp, mlp_in, ROUNDED)  # type: ignore[arg-type]
                assert_rounded_alike(out["latent"], latent, "latent")
        for name in ("route_ids", "route_weights", "latent"):
            if name in found[0][turn]:
                assert torch.equal(found[0][turn][name], found[1][turn][name]), name


def test_a_grid_has_a_program_more_for_each_of_many_rows() -> None:
    grids = {}
    for rows in (1, 2, 3, 64):
        (_, step), _ = Gates(CASES["k3"], rows).ranks
        grids[rows] = step.launch.grid[0]
        assert step.then == ()
    assert grids == {1: grids[1], 2: grids[1], 3: grids[1] + 3, 64: grids[1] + 64}
