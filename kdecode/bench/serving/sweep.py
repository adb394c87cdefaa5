"""Several comparisons of the same two servers, over batch and context: a table and a page.

Owns what is shown of each. Every point is a comparison of its own, with its own verdict and, where
it has one, its own ratio; figures of two points are beside each other, and never divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from kdecode.bench.serving import charts, report
from kdecode.bench.serving.protocol import ServedComparison
from kdecode.bench.serving.report_html import page
from kdecode.bench.serving.summary import ServedSummary
from kdecode.bench.tables import columns

HEAD = (
    *("at a time", "prompt", "verdict", "ratio of tpot", "95 % interval"),
    *("a: tok/s a user", "b: tok/s a user", "a: output tok/s", "b: output tok/s"),
    *("a: step", "b: step", "comparison"),
)


@dataclass(frozen=True)
class SweepPoint:
    concurrency: int
    prompt_tokens: int
    comparison: ServedComparison

    def cells(self) -> tuple[str, ...]:
        found, ratio = self.comparison, self.comparison.ratios.get("tpot")
        a, b = found.summaries
        return (
            str(self.concurrency),
            str(self.prompt_tokens),
            found.verdict,
            "none" if ratio is None else f"{ratio.ratio:.3f}",
            "-" if ratio is None else f"[{ratio.low:.3f}, {ratio.high:.3f}]",
            *(_rate(summary.interactivity_p50) for summary in (a, b)),
            *(_rate(summary.output_tps) for summary in (a, b)),
            *(_step(summary) for summary in (a, b)),
            found.comparison_id,
        )


def render_sweep(points: Sequence[SweepPoint]) -> str:
    """The table for a terminal; a table for each kind of results."""
    lines = []
    for kind, group in _by_kind(points):
        lines += [f"sweep, {kind}", *columns([HEAD, *(point.cells() for point in group)]), ""]
    return "\n".join(lines)


def render_sweep_html(points: Sequence[SweepPoint]) -> str:
    """The same as a page, with plots over batch and context."""
    style = resources.files("kdecode.bench.serving").joinpath("report.css").read_text("utf-8")
    sections = ["<h1>Sweep over batch and context</h1>"]
    for kind, group in _by_kind(points):
        head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in point.cells()) + "</tr>"
            for point in group
        )
        banner = f'<p class="banner">{report.SYNTHETIC_BANNER}</p>' if "synthetic" in kind else ""
        sections.append(
            f"<section><h2>{escape(kind)}</h2>{banner}<div class=scroll><table><thead><tr>{head}"
            f"</tr></thead><tbody>{rows}</tbody></table></div></section>"
        )
        sections += [
            f"<section><h3>{escape(name)}</h3>{picture}</section>"
            for name, picture in _plots(group)
            if picture is not None
        ]
    return page("Sweep over batch and context", style, "".join(sections))


def _by_kind(points: Sequence[SweepPoint]) -> list[tuple[str, list[SweepPoint]]]:
    """Points whose arms gave other kinds of results than each other are a group of their own."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        kinds = dict.fromkeys(facts.study for facts in point.comparison.facts)
        groups.setdefault(" | ".join(kinds), []).append(point)
    return list(groups.items())


def _plots(points: Sequence[SweepPoint]) -> list[tuple[str, str | None]]:
    if len({facts.study for facts in points[0].comparison.facts}) > 1:
        return []
    return [
        (
            "Throughput against the speed of one user",
            _lines(
                points,
                lambda p, s: s.interactivity_p50,
                lambda s: s.output_tps,
                ("interactivity P50, tok/s a user", "output tok/s"),
                by_context=True,
            ),
        ),
        (
            "Step time by batch",
            _lines(
                points,
                lambda p, s: float(p.concurrency),
                lambda s: None if s.counts.step_s is None else 1e3 * s.counts.step_s,
                ("requests at a time", "step time, ms"),
                by_context=True,
            ),
        ),
        (
            "Step time by context",
            _lines(
                points,
                lambda p, s: float(p.prompt_tokens),
                lambda s: None if s.counts.step_s is None else 1e3 * s.counts.step_s,
                ("prompt tokens", "step time, ms"),
                by_context=False,
            ),
        ),
    ]


def _lines(
    points: Sequence[SweepPoint],
    x: Callable[[SweepPoint, ServedSummary], float | None],
    y: Callable[[ServedSummary], float | None],
    labels: tuple[str, str],
    *,
    by_context: bool,
) -> str | None:
    """The arms over one of the two sizes, at the smallest value of the other."""
    if by_context:
        least = min(point.prompt_tokens for point in points)
        shown = [point for point in points if point.prompt_tokens == least]
    else:
        least = min(point.concurrency for point in points)
        shown = [point for point in points if point.concurrency == least]
    if len(shown) < 2:
        return None
    series = []
    for arm, name in enumerate(points[0].comparison.arm_names):
        found = []
        for point in shown:
            summary = point.comparison.summaries[arm]
            place, value = x(point, summary), y(summary)
            if place is not None and value is not None:
                found.append((place, value))
        series.append(charts.Series(name, found))
    return charts.plot(series, *labels)


def _rate(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _step(summary: ServedSummary) -> str:
    step = summary.counts.step_s
    return "not told" if step is None else f"{1e3 * step:.3f} ms"
