"""Plots as SVG elements: lines, points, bars, with axes that a person can read.

Owns geometry and marks. Colours are the page's, by the class of a series, so that a plot follows
its light and dark look; nothing is loaded from anywhere. Does not know what is plotted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44
_MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """Points of one arm. kind: joined by lines, in steps, or not at all."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "line"


def distribution(name: str, values: Sequence[float]) -> Series:
    """The share of values up to each of them."""
    ordered = sorted(values)
    points = [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]
    if len(points) > _MAX_POINTS:
        stride = len(points) / _MAX_POINTS
        points = [points[int(i * stride)] for i in range(_MAX_POINTS)] + [points[-1]]
    return Series(name, points, "step")


def plot(
    series: Sequence[Series], x_label: str, y_label: str, *, from_zero: bool = True
) -> str | None:
    """One plot; None where there is nothing to show."""
    shown = [one for one in series if one.points]
    if not shown:
        return None
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points]
    x_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(0.0 if from_zero else min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(x_axis, y_axis, x_label, y_label)]
    for number, one in enumerate(shown):
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in one.points]
        parts.append(_marks(one, places, f"series{number}"))
    return _figure(parts, [one.name for one in shown], f"{y_label} over {x_label}")


def bars(groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], y_label: str) -> str:
    """A group of bars for each name, with one bar a series."""
    top = max((value for _, values in series for value in values), default=0.0)
    y_axis = _Axis(0.0, top, HEIGHT - _BOTTOM, _TOP)
    room = (WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    parts = [*_grid(y_axis), _text(12, (HEIGHT - _BOTTOM + _TOP) / 2, y_label, turn=True)]
    width = room * 0.7 / max(len(series), 1)
    for place, group in enumerate(groups):
        left = _LEFT + place * room
        parts.append(_text(left + room / 2, HEIGHT - _BOTTOM + 18, group))
        for number, (_, values) in enumerate(series):
            y = y_axis.place(values[place])
            x = left + room * 0.15 + number * width
            height = max(0.0, HEIGHT - _BOTTOM - y)
            parts.append(
                f'<rect class="fill{number}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"><title>{escape(group)}: {values[place]:.4g}</title></rect>'
            )
    return _figure(parts, [name for name, _ in series], y_label)


class _Axis:
    """A range of values on a range of places, with round numbers for ticks."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        if high <= low:
            low, high = low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9
        step = _round_step((high - low) / 5)
        self._low, self._high = math.floor(low / step) * step, math.ceil(high / step) * step
        self._begin, self._end = begin, end
        self._step = step

    def place(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[float]:
        count = round((self._high - self._low) / self._step)
        return [self._low + number * self._step for number in range(count + 1)]


def _round_step(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= size)


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[str]:
    parts = _grid(y_axis)
    parts += [
        _text(x_axis.place(tick), HEIGHT - _BOTTOM + 16, f"{tick:.4g}") for tick in x_axis.ticks()
    ]
    parts.append(_text((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 6, x_label))
    parts.append(_text(12, (HEIGHT - _BOTTOM + _TOP) / 2, y_label, turn=True))
    return parts


def _grid(y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:.4g}", anchor="end"))
    return parts


def _marks(series: Series, places: Sequence[tuple[float, float]], name: str) -> str:
    if series.kind == "points":
        dots = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{value[0]:.4g}, {value[1]:.4g}</title>'
            "</circle>"
            for (x, y), value in zip(places, series.points, strict=True)
        )
        return f'<g class="points {name}">{"".join(dots)}</g>'
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for (_, before), (x, y) in itertools.pairwise(places):
        path += f"L{x:.1f} {before:.1f}" if series.kind == "step" else ""
        path += f"L{x:.1f} {y:.1f}"
    return f'<path class="line {name}" d="{path}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'


def _figure(parts: Sequence[str], names: Sequence[str], title: str) -> str:
    legend = "".join(
        f'<span class="key"><i class="swatch{number}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"
    )
