"""Findings as lines of a report and as plain JSON values; every report writes them alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kdecode.bench.metrics import Spread
from kdecode.bench.statistics import RatioEstimate


def estimate_text(metric: str, estimate: RatioEstimate) -> str:
    """A ratio with everything that it needs beside it."""
    return (
        f"{estimate.ratio:.3f}, 95 % interval "
        f"[{estimate.low:.3f}, {estimate.high:.3f}] ({metric}; {estimate.num_pairs} pairs in "
        f"{estimate.num_blocks} blocks; worst block {estimate.worst_block:.3f}; smallest "
        f"effect this design would see {100 * (estimate.detectable - 1):.1f} %)"
    )


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # JSON has no NaN or infinity; they are kept as text rather than lost.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)),
                row[-1],
            ]
        )
        for row in rows
    ]


def spread_text(spread: Spread | None) -> str:
    if spread is None:
        return "undefined"
    return f"{1000 * spread.p50:.3f} / {1000 * spread.p90:.3f} ms"


def rate(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f} tok/s"


def legend(formulas: Mapping[str, str]) -> list[str]:
    """The formula of every name."""
    width = max(map(len, formulas))
    return ["how the numbers were obtained"] + [
        f"  {name:<{width}}  {formula}" for name, formula in formulas.items()
    ]
