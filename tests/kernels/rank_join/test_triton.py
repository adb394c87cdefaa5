"""rank_join in Triton against the reference's residual, mix and norm of the ranks' parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expert_cases import wide_tiles
from rank_cases import OneOfSeveral, sum_of
from torch import Tensor
from triton_cases import Case, k3_config, linear_config, make_case

from kdecode.kernels.common import mix_norm
from kdecode.kernels.common.mix_norm import OUTPUTS, mix_norm_of
from kdecode.kernels.common.rank_parts import Place
from kdecode.kernels.common.rank_tile import rank_tile
from kdecode.kernels.rank_join.op import JoinUse, contract_at
from kdecode.kernels.rank_join.triton_impl import prepare, refuse
from kdecode.model import reference
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close, bit_equal

CASES = {
    "k3": make_case(k3_config()),
    "kimi-linear": make_case(linear_config()),
    "no shared experts": make_case(linear_config(num_shared=0)),
}
# Layer 0 has a dense MLP, and the last is 4 or 3; snapshots are pushed before layers 0, 2 and 4.
PLACES: tuple[tuple[Place, int | None], ...] = (
    ("embed", None),
    ("attn", 0),
    ("attn", 1),
    ("attn", 2),
    ("mlp", 0),
    ("routed", 2),
    ("routed", -1),
)


@dataclass(frozen=True)
class Join:
    """A place of a model: ``layer`` ends there, and ``then`` of ``next_layer`` follows."""

    case: Case
    place: Place
    layer: int | None
    then: mix_norm.Place
    next_layer: int | None

    @staticmethod
    def of(name: str, place: Place, layer: int | None) -> Join:
        case = CASES[name]
        last = case.config.num_layers - 1
        layer = last if layer == -1 else layer
        if place == "embed":
            return Join(case, place, None, "attn", 0)
        assert layer is not None
        if place == "attn":
            return Join(case, place, layer, "mlp", layer)
        if layer == last:
            return Join(case, place, layer, "final", None)
        return Join(case, place, layer, "attn", layer + 1)

    @property
    def num_before(self) -> int:
        """Snapshots that exist when the step begins."""
        config = self.case.config
        if self.layer is None or config.attn_res_block is None:
            return 0
        return config.snapshots_before(self.layer if self.place == "attn" else self.layer + 1)

    @property
    def is_push(self) -> bool:
        return self.place == "attn" and self.case.config.is_snapshot_layer(self.layer or 0)

    def use(self) -> JoinUse:
        packed = self.case.packed
        owner: Any = packed if self.next_layer is None else packed.layers[self.next_layer]
        then = mix_norm_of(self.case.config, self.then, self.next_layer, owner)
        return JoinUse(self.place, then)

    def expected(self, ours: OneOfSeveral, seed: int) -> dict[str, Tensor]:
        """Fills what the step reads; returns what it has to write."""
        out: dict[str, Tensor] = {}
        snapshots = torch.empty(0, ours.rows, self.case.config.hidden_size, dtype=torch.bfloat16)
        if self.num_before:
            snapshots = ours.fill("snapshots", seed + 1, self.num_before)
        if self.place == "embed":
            prefix = self._embedded(ours, seed)
        else:
            prefix = ours.fill("prefix", seed + 2)
        if self.place == "attn":
            out["attn_delta"] = sum_of(ours.give("attn_part", seed))
            prefix, snapshots = reference.attn_residual(
                prefix, snapshots, out["attn_delta"], self.is_push, ROUNDED
            )
        elif self.place == "mlp":
            out["mlp_delta"] = sum_of(ours.give("mlp_part", seed))
            prefix = reference.mlp_residual(prefix, out["mlp_delta"], None, ROUNDED)
        elif self.place == "routed":
            routed, shared = self._routed(ours, out, seed)
            delta = routed if shared is None else (routed.float() + shared.float()).bfloat16()
            out["mlp_delta"] = delta
            prefix = reference.mlp_residual(prefix, routed, shared, ROUNDED)
        out["prefix"] = prefix
        return out | self._mixed(prefix, snapshots)

    def _embedded(self, ours: OneOfSeveral, seed: int) -> Tensor:
        parts, vocab = ours.give("embed_part", seed), self.case.config.vocab_size
        tokens = torch.arange(ours.rows) * 53 % (vocab * ours.ranks.size)
        ours.buffers["row_token"].copy_(tokens)
        return torch.stack([parts[token // vocab][row] for row, token in enumerate(tokens)])

    def _routed(
        self, ours: OneOfSeveral, out: dict[str, Tensor], seed: int
    ) -> tuple[Tensor, Tensor | None]:
        moe = self.case.config.moe
        shared = ours.fill("shared", seed + 3) if moe.num_shared else None
        if moe.latent_width is None:
            return ours.fill("expert_sum", seed + 4), shared
        out["routed"] = torch.cat(ours.give("routed_part", seed), dim=1)
        return out["routed"], shared

    def _mixed(self, prefix: Tensor, snapshots: Tensor) -> dict[str, Tensor]:
        parameters, eps = self.case.parameters, self.case.config.rms_eps
        if self.next_layer is None:
            mix, norm = parameters.final_mix, parameters.norm
        else:
            layer = parameters.layers[self.next_layer]
            is_mlp = self.then == "mlp"
            mix = layer.mlp_mix if is_mlp else layer.attn_mix
            norm = layer.post_norm if is_mlp else layer.input_norm
        mixed = reference.mix(mix, prefix, snapshots, eps, ROUNDED)
        values = (mixed, reference.rms_norm(mixed, norm, eps, ROUNDED))
        return dict(zip(OUTPUTS[self.then], values, strict=True))


def check(join: Join, rows: int, size: int = 4, runs: int = 2) -> None:
    """A second run finds the counters as the first one did."""
    ours = OneOfSeveral(join.case, size, rows)
    problem = ours.problem(join.layer)
    assert refuse(problem) == []
    step = wide_tiles(lambda: prepare(problem, join.use(), ours.buffers))
    assert step.launch.grid == (3, rows)
    contract = contract_at(join.place, join.then)
    for seed in range(0, 10 * runs, 10):
        ours.poison()
        wanted = join.expected(ours, seed)
        before = {name: tensor.cpu().clone() for name, tensor in ours.buffers.items()}
        step.run()
        out = {name: tensor.cpu() for name, tensor in ours.buffers.items()}
        assert set(wanted) <= set(contract.writes)
        for name, value in wanted.items():
            assert_close(out[name], value, contract.tolerance, name)
            if name not in OUTPUTS[join.then]:
                bit_equal(out[name], value, name)
        if join.is_push:
            bit_equal(out["snapshots"][join.num_before], before["prefix"], "the pushed snapshot")
        unchanged = set(before) - set(wanted) - ({"snapshots"} if join.is_push else set())
        for name in (name for name in unchanged if not name.startswith("scratch.")):
            assert torch.equal(_bits(out[name]), _bits(before[name])), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("place", "layer"), PLACES)
def test_matches_the_reference(place: Place, layer: int | None, rows: int) -> None:
    check(Join.of("k3", place, layer), rows)


@pytest.mark.parametrize("rows", [2, 4, 5, 6, 7])
def test_any_number_of_rows(rows: int) -> None:
    check(Join.of("k3", "attn", 2), rows, runs=1)


@pytest.mark.parametrize("name", ["kimi-linear", "no shared experts"])
@pytest.mark.parametrize(("place", "layer"), [p for p in PLACES if p not in (("attn", 2),)])
def test_without_attention_residuals_and_latents(
    name: str, place: Place, layer: int | None
) -> None:
    check(Join.of(name, place, layer), 3, size=2, runs=1)


@pytest.mark.parametrize(("place", "layer"), [("embed", None), ("attn", 2), ("routed", 2)])
def test_sixty_four_rows(place: Place, layer: int | None) -> None:
    check(Join.of("k3", place, layer), 64, size=2, runs=1)


def test_a_token_that_no_rank_has_makes_its_row_nan() -> None:
    join = Join.of("k3", "embed", None)
    ours = OneOfSeveral(join.case, 2, 3)
    step = wide_tiles(lambda: prepare(ours.problem(None), join.use(), ours.buffers))
    ours.poison()
    wanted = join.expected(ours, 0)
    ours.buffers["row_token"][0] = -1
    ours.buffers["row_token"][2] = 2 * join.case.config.vocab_size
    step.run()
    for name in ("prefix", "attn_in"):
        out = ours.buffers[name].cpu()
        assert out[[0, 2]].isnan().all()
        assert_close(out[1], wanted[name][1], contract_at("embed", "attn").tolerance, name)


def test_programs_have_more_columns_where_there_are_many_rows() -> None:
    """About as many programs as a large GPU has processors, or twice as many."""
    tiles = {rows: rank_tile("rank_join", "sm_100", rows, 7168, 16, 16) for rows in (1, 8, 16, 64)}
    found = {rows: tile.block_n for rows, tile in tiles.items()}
    assert found == {1: 512, 8: 512, 16: 1024, 64: 2048}
