"""Which tiles are fastest on this GPU: what `kdecode bench tune` writes into the tile table.

Owns the search. A plan asks for tiles while it is built (`tile_table.recording`); for each of them
neighbours are tried, one number of the tile halved or doubled, as long as that makes the step that
it is for faster. A tile counts only if the step writes what it wrote before, within its tolerance.
Does not know kernels, nor how a step is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kdecode.decode.plan import DecodePlan, Step
from kdecode.kernels.common.tile_table import MAX_VALUE, TileKey, choose, forced, recording
from kdecode.testing.compare import difference

# A tile has to be so much faster than the best one before: less is noise of the clock.
_GAIN = 0.97
_MAX_ROUNDS = 6

Clock = Callable[[Callable[[], None]], float]


@dataclass(frozen=True)
class Tuned:
    """The best tile that was found for a key. tried: tiles that ran, the first one included."""

    key: TileKey
    tile: Any
    microseconds: float
    first: Any
    first_microseconds: float
    tried: int

    @property
    def is_better(self) -> bool:
        return bool(self.tile != self.first)


def tune(
    build: Callable[[], DecodePlan], clock: Clock, kernels: Sequence[str] = ()
) -> Iterator[Tuned]:
    """The best tile of each key that a plan asks for, as each is found.

    build: the plan, loaded with a batch's inputs, on memory that all such plans share. clock: the
    microseconds of a run of one step. kernels: of the keys; none for all of them.
    """
    with recording() as asked:
        plan = build()
    plan.run()
    for key, default in asked.items():
        if not kernels or key.kernel in kernels:
            found = _Search(build, clock, plan, key).run(choose(*_parts(key), default))
            if found is not None:
                yield found


def neighbours(tile: Any) -> list[Any]:
    """Tiles of which one number is half or twice this one's."""
    found = []
    for field in dataclasses.fields(tile):
        value = getattr(tile, field.name)
        changed = [value * 2] + ([value // 2] if value % 2 == 0 else [])
        found += [
            dataclasses.replace(tile, **{field.name: number})
            for number in changed
            if 1 <= number <= MAX_VALUE
        ]
    return found


@dataclass(frozen=True)
class _Search:
    """From one tile downhill. plan: built with the tile that the search begins with."""

    build: Callable[[], DecodePlan]
    clock: Clock
    plan: DecodePlan
    key: TileKey

    def run(self, first: Any) -> Tuned | None:
        """None for a tile of which no neighbour changes any launch that can run."""
        best = first
        first_spent = spent = None
        tried: set[Any] = {first}
        for _ in range(_MAX_ROUNDS):
            times = {}
            for tile in neighbours(best):
                step = None if tile in tried else self._step_with(tile)
                if step is None:
                    continue
                tried.add(tile)
                index, changed = step
                if first_spent is None:
                    first_spent = spent = self.clock(self.plan.steps[index].run)
                if self._is_same(self.plan.steps[index], changed):
                    times[tile] = self.clock(changed.run)
            fastest = min(times, key=lambda tile: times[tile], default=None)
            if fastest is None or spent is None or times[fastest] > _GAIN * spent:
                break
            best, spent = fastest, times[fastest]
        if first_spent is None or spent is None:
            return None
        return Tuned(self.key, best, spent, first, first_spent, len(tried))

    def _step_with(self, tile: Any) -> tuple[int, Step] | None:
        """The first step that another tile changes, and its place; None if it cannot run."""
        with forced({self.key: tile}):
            try:
                plan = self.build()
            except (ValueError, AssertionError):
                return None
        pairs = zip(self.plan.steps, plan.steps, strict=True)
        for index, (before, after) in enumerate(pairs):
            if _shape(before) != _shape(after):
                return index, after
        return None

    def _is_same(self, before: Step, after: Step) -> bool:
        """Whether two launches of a step, each on the memory as it is now, write the same."""
        from triton.runtime.errors import TritonError

        memory = _tensors(self.plan)
        held = [tensor.clone() for tensor in memory]
        try:
            before.run()
            expected = {name: self.plan.buffers[name].clone() for name in before.writes}
            _restore(memory, held)
            after.run()
            found = {name: self.plan.buffers[name].clone() for name in before.writes}
        except TritonError:
            # More registers or shared memory than there are, or what a kernel cannot do.
            return False
        finally:
            _restore(memory, held)
        return all(_is_close(found[name], expected[name], before) for name in expected)


def _is_close(found: torch.Tensor, expected: torch.Tensor, step: Step) -> bool:
    if not expected.is_floating_point():
        # Experts of equal scores may change places.
        return True
    measured = difference(found.cpu(), expected.cpu(), step.tolerance)
    return bool(torch.isfinite(found).all()) and measured.rms_ratio <= step.tolerance.rms_ratio


def _tensors(plan: DecodePlan) -> list[torch.Tensor]:
    caches = plan.buffers.caches
    pools = (caches.conv, caches.recurrent, caches.pages)
    return [*plan.buffers.values(), *(tensor for pool in pools for tensor in pool.values())]


def _restore(tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> None:
    for tensor, kept in zip(tensors, held, strict=True):
        tensor.copy_(kept)


def _shape(step: Step) -> list[object]:
    """What makes two launches of one step different programs."""
    prepared: Any = step.prepared
    return [
        (launch.grid, dict(launch.constants), launch.num_warps, launch.num_stages)
        for launch in prepared.launches
    ]


def _parts(key: TileKey) -> tuple[str, str, str]:
    return key.kernel, key.arch, key.shape
