"""The tuner's search: a plan of one step whose time and results a test makes up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdecode.cli import main
from kdecode.decode.tune import Tuned, neighbours, tune
from kdecode.kernels.common.tile_table import TileKey, choose
from kdecode.kernels.contract import Tolerance

KEY = TileKey("made_up", "sm_90", "rows 1, 8 x 8")


@dataclass(frozen=True)
class Tile:
    block: int
    warps: int


@dataclass
class MadeUp:
    """A plan whose step adds one to its state and writes that; some tiles are wrong or fail."""

    wrong: frozenset[Tile] = frozenset()
    failing: frozenset[Tile] = frozenset()
    refused: frozenset[Tile] = frozenset()

    def __post_init__(self) -> None:
        caches = SimpleNamespace(conv={}, recurrent={1: torch.zeros(2)}, pages={})
        self.buffers = _Buffers(out=torch.zeros(2))
        self.buffers.caches = caches

    def build(self) -> Any:
        tile = choose(KEY.kernel, KEY.arch, KEY.shape, Tile(16, 4))
        if tile in self.refused:
            raise ValueError("This tile does not fit the kernel.")
        launch = SimpleNamespace(
            grid=(1,), constants={"BLOCK": tile.block}, num_warps=tile.warps, num_stages=2
        )
        step = SimpleNamespace(
            prepared=SimpleNamespace(launches=(launch,)),
            run=_Run(self, tile),
            writes=("out",),
            tolerance=Tolerance(1e-3, 1e-3, 1e-3),
        )
        return SimpleNamespace(steps=(step,), buffers=self.buffers, run=step.run)


class _Buffers(dict[str, torch.Tensor]):
    caches: Any


@dataclass(frozen=True)
class _Run:
    plan: MadeUp
    tile: Tile

    def __call__(self) -> None:
        from triton.runtime.errors import OutOfResources

        if self.tile in self.plan.failing:
            raise OutOfResources(300_000, 232_448, "shared memory")
        state = self.plan.buffers.caches.recurrent[1]
        state += 1
        self.plan.buffers["out"].copy_(state * (2 if self.tile in self.plan.wrong else 1))


def _tuned(plan: MadeUp, time_of: Callable[[Tile], float], kernels: tuple[str, ...] = ()) -> Any:
    found: list[Tuned] = list(tune(plan.build, lambda run: time_of(run.tile), kernels))
    return found


def test_a_tile_is_followed_downhill_to_the_fastest() -> None:
    plan = MadeUp()
    (found,) = _tuned(plan, lambda tile: abs(tile.block - 128) + abs(tile.warps - 8) + 1.0)
    assert (found.key, found.first, found.tile) == (KEY, Tile(16, 4), Tile(128, 8))
    assert (found.first_microseconds, found.microseconds) == (117.0, 1.0)
    assert found.is_better
    # What a tile was tried on is as it was before.
    assert plan.buffers.caches.recurrent[1].tolist() == [1, 1]


def test_noise_changes_nothing() -> None:
    (found,) = _tuned(MadeUp(), lambda tile: 100.0 - (tile.block == 32))
    assert (found.tile, found.is_better) == (Tile(16, 4), False)
    assert found.tried == 1 + len(neighbours(Tile(16, 4)))


@pytest.mark.parametrize("kind", ["wrong", "failing", "refused"])
def test_a_fast_tile_that_is_wrong_or_cannot_run_is_left_out(kind: str) -> None:
    bad = {kind: frozenset({Tile(32, 4), Tile(8, 4)})}
    (found,) = _tuned(MadeUp(**bad), lambda tile: 1.0 if tile.block != 16 else 9.0 + tile.warps)
    # Two warps are the way round the bad tiles.
    assert found.tile in (Tile(32, 2), Tile(8, 2))


def test_kernels_are_chosen_by_name() -> None:
    assert _tuned(MadeUp(), lambda tile: 1.0, ("another",)) == []
    assert len(_tuned(MadeUp(), lambda tile: 1.0, (KEY.kernel,))) == 1


def test_neighbours_halve_or_double_one_number() -> None:
    assert neighbours(Tile(1, 6)) == [Tile(2, 6), Tile(1, 12), Tile(1, 3)]
    assert neighbours(Tile(1 << 16, 3)) == [Tile(1 << 15, 3), Tile(1 << 16, 6)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "cpu"), "Tiles are of kernels for a GPU; --device is cpu."),
        (("--output", "/nowhere/table.json"), "/nowhere/table.json cannot be written"),
        (("--tensor-parallel-size", "7"), "96 KDA heads cannot be divided among 7 ranks"),
    ],
)
def test_what_cannot_be_tuned_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["bench", "tune", *arguments]) == 2
    assert words in capsys.readouterr().err
