"""What a CUDA plan launches: grids, tiles, and what a compiler makes of it.

Owns the lines behind `kdecode plan --arch`: one a launch, with registers and memory where the plan
was compiled, and the layers of a kind as one group. Knows neither ops nor how a launch is
made or compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdecode.config import ModelConfig
from kdecode.decode.latency_cuda import launches
from kdecode.decode.plan import DecodePlan, Step
from kdecode.decode.streams import MAIN, stream_text

if TYPE_CHECKING:
    from kdecode.kernels.common.triton_compile import Resources

# Constants of a kernel that are choices, not sizes of the model, begin so.
_TILE_NAMES = ("BLOCK", "SPLIT")


@dataclass(frozen=True)
class LaunchLine:
    """One launch of a plan. layer: of its first stage. tile: what the kernel's constants choose.

    begins_early: while the launch before it runs. moves: of an exchange between ranks the values,
    and the bytes that each rank gives of a row; the exchange is inside of the launch, or a line
    that is none. stream, waits_for: as the plan's step has them. compiled: what a program takes;
    None where nothing was compiled.
    """

    layer: int | None
    op: str
    impl: str
    covers: tuple[str, ...]
    kernel: str
    grid: tuple[int, ...]
    warps: int
    stages: int
    begins_early: bool
    tile: Mapping[str, int]
    weight_bytes: int
    moves: str = ""
    stream: str = MAIN
    waits_for: tuple[str, ...] = ()
    compiled: Resources | None = None

    @property
    def is_launch(self) -> bool:
        """Of ours: an exchange by itself is not."""
        return bool(self.grid)


def launch_lines(plan: DecodePlan) -> list[LaunchLine]:
    """The launches and exchanges of a plan that was built, in order; a commit's come last."""
    return [_line(step, launch) for step, launch in _launches(plan)]


def step_lines(steps: Sequence[Step]) -> list[LaunchLine]:
    """The same of steps that are no plan's."""
    return [_line(step, launch) for step, launch in _of_steps(steps)]


def compile_lines(
    plan: DecodePlan, arch: str, folder: Path, processes: int = 1
) -> list[LaunchLine]:
    """`launch_lines` of a plan that was built for an architecture, compiled for it.

    folder: where results are kept. Raises CompileError for what cannot be compiled.
    """
    return _compiled(list(_launches(plan)), arch, folder, processes)


def compile_steps(
    steps: Sequence[Step], arch: str, folder: Path, processes: int = 1
) -> list[LaunchLine]:
    """`step_lines`, compiled as a plan is."""
    return _compiled(list(_of_steps(steps)), arch, folder, processes)


def _compiled(
    launched: Sequence[tuple[Step | None, Any]], arch: str, folder: Path, processes: int
) -> list[LaunchLine]:
    from kdecode.kernels.common.compiled_launches import resources_of

    every = [launch for _, launch in launched if launch is not None]
    taken = iter(resources_of(every, arch, folder, processes))
    lines = [_line(step, launch) for step, launch in launched]
    return [replace(line, compiled=next(taken)) if line.is_launch else line for line in lines]


def _launches(plan: DecodePlan) -> Iterator[tuple[Step | None, Any]]:
    """Each launch with its step; with None those of the commit. An exchange has None."""
    yield from _of_steps(plan.steps)
    # A plan's own launches are those of its steps, in order, before any of the commit.
    own = sum(launch is not None for _, launch in _of_steps(plan.steps))
    yield from ((None, launch) for launch in launches(plan)[own:])


def _of_steps(steps: Sequence[Step]) -> Iterator[tuple[Step, Any]]:
    for step in steps:
        launched = _prepared(step)
        yield from ((step, launch) for launch in launched)
        if step.exchanges and not launched:
            yield step, None


def _line(step: Step | None, launch: Any) -> LaunchLine:
    if launch is None:
        assert step is not None
        return _exchange_line(step)
    return LaunchLine(
        layer=None if step is None else step.layers[0],
        op="kda_commit" if step is None else step.op,
        impl="triton" if step is None else step.impl,
        covers=() if step is None else step.covers,
        kernel=getattr(launch.kernel, "fn", launch.kernel).__name__,
        grid=tuple(launch.grid),
        warps=launch.num_warps,
        stages=launch.num_stages,
        begins_early=launch.begins_early,
        tile={
            key: value
            for key, value in launch.constants.items()
            if key.startswith(_TILE_NAMES) and isinstance(value, int)
        },
        weight_bytes=0 if step is None else step.weight_bytes or 0,
        moves=_moved(step) if step is not None and launch is _prepared(step)[-1] else "",
        stream=MAIN if step is None else step.stream,
        waits_for=() if step is None else step.waits_for,
    )


def _prepared(step: Step) -> tuple[Any, ...]:
    # Of a `TritonStep`, whose module cannot be imported without Triton, or of a `CuteStep`.
    prepared: Any = step.prepared
    launched: tuple[Any, ...] = prepared.launches
    return launched


def _moved(step: Step) -> str:
    if not step.exchanges:
        return ""
    (values,) = step.exchanges
    size = sum(value.row_bytes for value in values)
    return f"{' + '.join(value.value for value in values)}, {size:,} bytes a row"


def _exchange_line(step: Step) -> LaunchLine:
    return LaunchLine(
        layer=step.layers[0],
        op=step.op,
        impl=step.impl,
        covers=(),
        kernel="-",
        grid=(),
        warps=0,
        stages=0,
        begins_early=False,
        tile={},
        weight_bytes=0,
        moves=_moved(step),
    )


@dataclass(frozen=True)
class LaunchGroup:
    """Layers of one kind. columns: for each of their launches, in order, that of every layer.

    name: the kind; of what lies outside of the layers, where. layers: none there. A launch that
    reaches into the next layer belongs to the one where it begins.
    """

    name: str
    layers: tuple[int, ...]
    columns: tuple[tuple[LaunchLine, ...], ...]


def layer_kind(config: ModelConfig, layer: int) -> str:
    mlp = "dense" if config.mlp_kinds[layer] == "dense" else "MoE"
    return f"{config.layer_kinds[layer].upper()} + {mlp}"


def group_lines(config: ModelConfig, lines: Sequence[LaunchLine]) -> list[LaunchGroup]:
    """The launches of a plan in its order, each kind of layer once."""
    members: dict[object, list[tuple[LaunchLine, ...]]] = {}
    for number, (layer, run) in enumerate(groupby(lines, key=lambda line: line.layer)):
        steps = tuple(run)
        kind = number if layer is None else layer_kind(config, layer)
        kernels = tuple((line.op, line.impl, line.kernel) for line in steps)
        members.setdefault((kind, kernels), []).append(steps)
    groups: list[LaunchGroup] = []
    for found in members.values():
        layers = tuple(run[0].layer for run in found if run[0].layer is not None)
        if layers:
            name = layer_kind(config, layers[0])
            is_known = any(group.name == name for group in groups)
            name += f", from {layers[0]}" if is_known else ""
        else:
            name = "after" if groups else "before"
        groups.append(LaunchGroup(name, layers, tuple(zip(*found, strict=True))))
    return groups


def too_large(lines: Iterable[LaunchLine], arch: str) -> list[str]:
    """Which kernels of a compiled plan cannot launch on the architecture, and why; [] of others."""
    most: dict[str, int] = {}
    for line in lines:
        if line.compiled is not None:
            name = line.op if line.op == line.kernel else f"{line.op} {line.kernel}"
            most[name] = max(line.compiled.shared_bytes, most.get(name, 0))
    if not most:
        return []
    limit = _shared_limit(arch)
    return [
        f"{name} cannot launch on {arch}: it takes {taken:,} bytes of shared memory, and a "
        f"program has at most {limit:,}."
        for name, taken in most.items()
        if taken > limit
    ]


def _shared_limit(arch: str) -> int:
    # Of what was compiled, for which Triton had to be there.
    from kdecode.kernels.common.triton_compile import SHARED_LIMITS

    return SHARED_LIMITS[arch]


def launch_rows(groups: Sequence[LaunchGroup], arch: str) -> list[tuple[str, ...]]:
    """Rows of a table, the head first. Where layers differ a cell has all that there is.

    What a program takes is the most of any layer; what is more than the architecture has is marked.
    """
    columns = [column for group in groups for column in group.columns]
    is_compiled = any(line.compiled is not None for column in columns for line in column)
    has_streams = any(line.stream != MAIN for column in columns for line in column)
    head = ["layers", "op", "impl", "kernel", "grid", "warps", "stages", "early", "tile"]
    head += ["stream"] if has_streams else []
    head += ["registers", "spilled", "shared"] if is_compiled else []
    rows = [(*head, "covers")]
    for group in groups:
        for index, column in enumerate(group.columns):
            first = column[0]
            cells = [
                group.name if index == 0 else "",
                first.op,
                first.impl,
                first.kernel,
                _all(" x ".join(map(str, line.grid)) or "-" for line in column),
                _all(str(line.warps or "-") for line in column),
                _all(str(line.stages or "-") for line in column),
                _all("yes" if line.begins_early else "-" for line in column),
                _what(column),
            ]
            if has_streams:
                cells.append(stream_text(first.stream, first.waits_for))
            if is_compiled:
                found = [line.compiled for line in column if line.compiled]
                cells += most_taken(found) if found else ["-"] * 3
                cells[-1] += " (too large)" if too_large(column, arch) else ""
            rows.append((*cells, _all(" ".join(line.covers) or "-" for line in column)))
    return rows


def _what(column: Sequence[LaunchLine]) -> str:
    """What an exchange moves; of a launch its tile, and what it reads of the other ranks."""
    first = column[0]
    if not first.is_launch:
        return first.moves
    tile = tile_text({name: _all(str(line.tile[name]) for line in column) for name in first.tile})
    return f"{tile}, of every rank {first.moves}" if first.moves else tile


def most_taken(compiled: Sequence[Resources]) -> list[str]:
    """Registers, spilled bytes and shared memory: the most of each."""
    taken = [(each.registers, each.stack_bytes, each.shared_bytes) for each in compiled]
    return [f"{max(sizes):,}" for sizes in zip(*taken, strict=True)]


def _all(cells: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(cells))


def tile_text(tile: Mapping[str, Any]) -> str:
    """Names as the table of tiles has them."""
    return " ".join(f"{name.removeprefix('BLOCK_').lower()}={tile[name]}" for name in tile) or "-"
