"""The decode plan: which steps run, what each covers, and in which buffers.

Owns the plan as data: validation, printing and stepwise running (`verify` compares two plans).
Does not know any backend or op; a backend is straight-line Python that builds one of these. There
are no passes and no rewriting: what the backend wrote is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kdecode.cache.open_rows import KeptRows
from kdecode.config import ModelConfig
from kdecode.decode.streams import MAIN, find_race, stream_text
from kdecode.kernels.contract import Buffers, Prepared, Tolerance
from kdecode.model.rank_share import Exchanged
from kdecode.model.stages import model_stages

Lifetime = Literal["input", "step"]


class PlanError(ValueError):
    """A plan that does not cover the model exactly once, or reads what nobody wrote."""


def cannot_run(begin: int = 0, end: int = 0) -> None:
    """What a step of a plan without weights does."""
    raise PlanError("This plan describes a configuration; it has no weights and cannot run.")


@dataclass(frozen=True)
class Buffer:
    """A named tensor of a plan; of lifetime "input" the caller writes it, of "step" a step does."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    lifetime: Lifetime = "step"


@dataclass(frozen=True)
class Step:
    """One launch of one implementation.

    layers: the layer of each covered stage's group, None before and after the stack. covers: stage
    names in order. weight_bytes: packed weights that one run reads at one row; None when not known.
    prepared: what ``run`` belongs to, where that says more than how to run it (a kernel's launch).
    exchanges: of several ranks, the values that each exchange of the step has, in order. stream:
    where the step runs when a plan is recorded, and waits_for: other streams; `decode.streams`.
    """

    layers: tuple[int | None, ...]
    covers: tuple[str, ...]
    op: str
    impl: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[], None]
    tolerance: Tolerance
    weight_bytes: int | None = None
    prepared: Prepared | None = None
    exchanges: tuple[tuple[Exchanged, ...], ...] = ()
    stream: str = MAIN
    waits_for: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[tuple[int | None, str], ...]:
        """Every (layer, stage) of this step, in order; a step of one layer lists it once."""
        if len(self.layers) == 1:
            return tuple((self.layers[0], stage) for stage in self.covers)
        return tuple(zip(self.layers, self.covers, strict=True))


@dataclass(frozen=True)
class DecodePlan:
    """Steps in order, over named buffers. rows None: any number of rows (the standard path)."""

    backend: str
    config: ModelConfig
    rows: int | None
    rows_per_request: int
    steps: tuple[Step, ...]
    buffer_specs: tuple[Buffer, ...]
    buffers: Buffers
    # One call that runs steps begin .. end - 1, when the backend has one; else they are launched
    # one by one.
    launch: Callable[[int, int], None] | None = None
    # What that one call is.
    launched_as: str = "one native call"
    # Of a static plan of verify steps: moves the KDA slots past the rows that stay.
    commit: Callable[[Sequence[KeptRows]], None] | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises PlanError unless each (layer, stage) is covered once, in order, and fed, and no
        two steps on different streams use a buffer at once."""
        expected = model_stages(self.config)
        covered = [stage for step in self.steps for stage in step.stages]
        for position, (want, have) in enumerate(zip(expected, covered, strict=False)):
            if want != have:
                raise PlanError(
                    f"stage {position} of the plan is {_stage_name(have)}, "
                    f"expected {_stage_name(want)}"
                )
        if len(covered) < len(expected):
            missing = ", ".join(_stage_name(stage) for stage in expected[len(covered) :][:4])
            raise PlanError(f"the plan ends before {missing}")
        if len(covered) > len(expected):
            raise PlanError(f"the plan covers {_stage_name(covered[len(expected)])} twice")
        specs = {spec.name: spec for spec in self.buffer_specs}
        if len(specs) != len(self.buffer_specs):
            raise PlanError("two buffers of the plan have one name")
        written = {name for name, spec in specs.items() if spec.lifetime != "step"}
        for index, step in enumerate(self.steps):
            for name in (*step.reads, *step.writes):
                if name not in specs:
                    raise PlanError(f"step {index} ({step.op}) uses the undeclared buffer {name}")
            for name in step.reads:
                if name not in written:
                    raise PlanError(
                        f"step {index} ({step.op}) reads {name} before any step wrote it"
                    )
            written.update(step.writes)
        race = find_race(self.steps)
        if race is not None:
            raise PlanError(race)

    def run(self) -> None:
        """All steps, in order."""
        self.run_range(0, len(self.steps))

    def run_range(self, begin: int, end: int) -> None:
        """Steps begin .. end - 1. Ranges that follow one another are a run."""
        if self.launch is not None:
            self.launch(begin, end)
            return
        for step in self.steps[begin:end]:
            step.run()

    def run_until(self, step: int) -> None:
        """Steps 0..step, inclusive, launched one by one."""
        for entry in self.steps[: step + 1]:
            entry.run()

    def explain(self) -> str:
        """One line a step: layer, op, implementation, weight bytes of one row, stages covered;
        where there are several also its stream.

        Of several ranks also what each gives the others of one row, and how much that is a layer.
        """
        has_exchanges = any(step.exchanges for step in self.steps)
        has_streams = any(step.stream != MAIN for step in self.steps)
        heads: tuple[str, ...] = ("exchanged bytes",) if has_exchanges else ()
        heads += ("stream",) if has_streams else ()
        rows = [("step", "layer", "op", "impl", "weight bytes", *heads, "covers")]
        for index, step in enumerate(self.steps):
            layer = "-" if step.layers[0] is None else str(step.layers[0])
            size = "-" if step.weight_bytes is None else f"{step.weight_bytes:,}"
            given: tuple[str, ...] = (_exchange_text(step.exchanges),) if has_exchanges else ()
            given += (stream_text(step.stream, step.waits_for),) if has_streams else ()
            covers = " ".join(step.covers)
            rows.append((str(index), layer, step.op, step.impl, size, *given, covers))
        row_text = "any number of rows"
        if self.rows is not None:
            row_text = f"{self.rows} row{'' if self.rows == 1 else 's'}"
        title = f"backend {self.backend}, {row_text}, {self.rows_per_request} a request"
        total = f"{len(self.steps)} steps"
        if self.launch is not None:
            total += f" in {self.launched_as}"
        return "\n".join([title, *_table(rows), total, *self._exchange_lines(), *self.notes]) + "\n"

    def _exchange_lines(self) -> list[str]:
        """Exchanges a step and a layer of each kind; [] for one rank."""
        layers: dict[int | None, list[tuple[Exchanged, ...]]] = {}
        for step in self.steps:
            if step.exchanges:
                layers.setdefault(step.layers[0], []).extend(step.exchanges)
        if not layers:
            return []
        lines = {}
        for layer, exchanges in layers.items():
            if layer is not None:
                mixer, mlp = self.config.layer_kinds[layer], self.config.mlp_kinds[layer]
                kind = f"a layer of {mixer} and {mlp}"
                lines[kind] = f"{kind}: {_given(exchanges)}"
        every = [values for exchanges in layers.values() for values in exchanges]
        return [f"a step: {_given(every)}", *lines.values()]


def _exchange_text(exchanges: Sequence[Sequence[Exchanged]]) -> str:
    """An exchange after the other: how, which values together, bytes of one row."""
    texts = []
    for values in exchanges:
        size = sum(value.row_bytes for value in values)
        names = " + ".join(value.value for value in values)
        texts.append(f"{values[0].kind} {names} {size:,}")
    return "; ".join(texts) or "-"


def _given(exchanges: Sequence[Sequence[Exchanged]]) -> str:
    size = sum(value.row_bytes for values in exchanges for value in values)
    count = len(exchanges)
    return (
        f"{count} exchange{'' if count == 1 else 's'}, {size:,} bytes that each rank gives of a row"
    )


def _stage_name(stage: tuple[int | None, str]) -> str:
    layer, name = stage
    return name if layer is None else f"layer {layer} {name}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns padded to their widest cell; numbers to the right, text to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in (0, 1, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
