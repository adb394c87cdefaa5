"""A comparison of servers as one page that loads nothing: findings, tables, plots.

Owns the page. Numbers and wording are `report`'s, plots `charts`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from importlib import resources

from kdecode.bench.machine import Machine
from kdecode.bench.metrics import RequestMetrics
from kdecode.bench.report import RATIO_LABELS
from kdecode.bench.serving import charts, report
from kdecode.bench.serving.design import MeasuredPass
from kdecode.bench.serving.protocol import ServedComparison
from kdecode.bench.serving.summary import ServedSummary
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.tables import estimate_text

_MS = 1e3


def render_html(comparison: ServedComparison, machine: Machine) -> str:
    style = resources.files("kdecode.bench.serving").joinpath("report.css").read_text("utf-8")
    title = f"{comparison.arm_names[1]} against {comparison.arm_names[0]}: {comparison.verdict}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _lines("Verdict", report.verdict_lines(comparison)),
        _ratios(comparison),
        "".join(_table(table) for table in report.tables(comparison)),
        "".join(
            f"<section><h2>{escape(name)}</h2>{picture}</section>"
            for name, picture in _plots(comparison)
        ),
        _lines("Coverage", report.coverage_lines(comparison)),
        _lines("Outputs", report.output_lines(comparison)),
        _lines("What was measured", report.header_lines(comparison, machine)),
        _formulas(),
    ]
    return page(title, style, "".join(sections))


def page(title: str, style: str, content: str) -> str:
    """A document that may load nothing at all."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{content}</main></body></html>\n"
    )


def _lines(name: str, lines: list[str]) -> str:
    items = "".join(f"<p>{escape(line.strip())}</p>" for line in lines)
    return f"<section><h2>{escape(name)}</h2>{items}</section>" if lines else ""


def _ratios(comparison: ServedComparison) -> str:
    """Each ratio as a bar on a scale around 1, its interval and what is beside it."""
    if not comparison.ratios:
        return ""
    rows = "".join(
        f"<div class=ratio><b>{escape(RATIO_LABELS[name])}</b>{_interval(estimate)}"
        f"<p>{escape(estimate_text(name, estimate))}</p></div>"
        for name, estimate in comparison.ratios.items()
    )
    note = escape(report.ratio_lines(comparison)[0])
    return f"<section><h2>Ratios</h2><p>{note}</p>{rows}</section>"


def _interval(estimate: RatioEstimate) -> str:
    low, high = min(estimate.low, 1.0), max(estimate.high, 1.0)
    margin = max((high - low) * 0.1, 0.01)
    low, high = low - margin, high + margin

    def x(value: float) -> float:
        return 600 * (value - low) / (high - low)

    begin, end = x(estimate.low), x(estimate.high)
    return (
        f'<svg class="interval" viewBox="0 0 600 40" role="img" aria-label="{estimate.ratio:.3f}">'
        f'<line class="grid" x1="{x(1.0):.1f}" x2="{x(1.0):.1f}" y1="0" y2="26"/>'
        f'<text x="{x(1.0):.1f}" y="38" text-anchor="middle">1</text>'
        f'<rect class="fill1" x="{begin:.1f}" y="8" width="{max(2.0, end - begin):.1f}" '
        f'height="12"/><circle class="dot" cx="{x(estimate.ratio):.1f}" cy="14" r="6"/></svg>'
    )


def _table(table: report.Table) -> str:
    banner = "" if table.banner is None else f'<p class="banner">{escape(table.banner)}</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *table.arms, "how"))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f"<section><h2>{escape(table.title)}</h2>{banner}<div class=scroll><table class=arms>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _formulas() -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(formula)}</td></tr>"
        for name, formula in report.formulas().items()
    )
    return (
        "<section><details><summary>How the numbers were obtained</summary><div class=scroll>"
        f"<table class=formulas>{rows}</table></div></details></section>"
    )


def _plots(comparison: ServedComparison) -> Iterator[tuple[str, str]]:
    """Only of arms that may share a table; others would be joined by their plot."""
    if len(report.tables(comparison)) > 1:
        return
    for name, label, read in (
        ("Time per token", "tpot, ms", lambda m: m.tpot_s),
        ("Time to first token", "ttft, ms", lambda m: m.ttft_s),
        ("Request latency", "e2e, ms", lambda m: m.e2e_s),
    ):
        series = [
            charts.distribution(arm, _values(comparison, number, read))
            for number, arm in enumerate(comparison.arm_names)
        ]
        if picture := charts.plot(series, label, "share of requests"):
            yield name, picture
    for name, found in (
        ("Tokens a second: for one user, and of all", _users(comparison)),
        ("Time per token by context", _contexts(comparison)),
        ("The blocks, in their order", _timeline(comparison)),
        ("Drafts accepted, by their place", _places(comparison)),
        ("Decode steps, by what served them", _steps(comparison)),
    ):
        if found:
            yield name, found


def _metrics(comparison: ServedComparison, arm: int) -> Iterator[tuple[int, RequestMetrics]]:
    """(prompt tokens, metrics) of the arm's measured requests."""
    for one in comparison.passes:
        for record in one.result.records:
            metrics = record.metrics()
            if one.arm == arm and metrics is not None and record.reply is not None:
                yield record.reply.prompt_tokens or 0, metrics


def _values(
    comparison: ServedComparison, arm: int, read: Callable[[RequestMetrics], float | None]
) -> list[float]:
    found = [read(metrics) for _, metrics in _metrics(comparison, arm)]
    return [_MS * value for value in found if value is not None]


def _median_tpot(one: MeasuredPass) -> float | None:
    times = sorted(
        metrics.tpot_s
        for record in one.result.records
        if (metrics := record.metrics()) is not None and metrics.tpot_s
    )
    return times[len(times) // 2] if times else None


def _users(comparison: ServedComparison) -> str | None:
    series = []
    for arm, name in enumerate(comparison.arm_names):
        points = []
        for one in comparison.passes:
            tpot, result = _median_tpot(one), one.result
            if one.arm == arm and tpot and result.end_ns > result.begin_ns:
                tokens = sum(r.reply.output_tokens for r in result.records if r.reply)
                points.append((1 / tpot, tokens / ((result.end_ns - result.begin_ns) / 1e9)))
        series.append(charts.Series(name, points, "points"))
    labels = ("interactivity, tok/s a user (1 / median tpot of a pass)", "output tok/s")
    return charts.plot(series, *labels)


def _contexts(comparison: ServedComparison) -> str | None:
    """Nothing to see where all contexts are the same."""
    series, contexts = [], set()
    for arm, name in enumerate(comparison.arm_names):
        points = [
            (float(prompt + metrics.n / 2), _MS * metrics.tpot_s)
            for prompt, metrics in _metrics(comparison, arm)
            if metrics.tpot_s is not None
        ]
        contexts |= {context for context, _ in points}
        series.append(charts.Series(name, points, "points"))
    labels = ("tokens in the context, in the middle of the reply", "tpot, ms")
    return charts.plot(series, *labels) if len(contexts) > 1 else None


def _timeline(comparison: ServedComparison) -> str | None:
    begin = min((one.result.begin_ns for one in comparison.passes), default=0)
    series = []
    for arm, name in enumerate(comparison.arm_names):
        points = [
            ((one.result.begin_ns - begin) / 1e9, _MS * tpot)
            for one in comparison.passes
            if one.arm == arm and (tpot := _median_tpot(one)) is not None
        ]
        series.append(charts.Series(name, points, "points"))
    return charts.plot(series, "s since the first block", "median tpot of a pass, ms")


def _places(comparison: ServedComparison) -> str | None:
    found: list[tuple[str, list[float]]] = []
    for name, summary in zip(comparison.arm_names, comparison.summaries, strict=True):
        counts = summary.counts
        if counts.accepted_by_place and counts.rounds:
            found.append((name, [n / counts.rounds for n in counts.accepted_by_place]))
    if not found:
        return None
    most = max(len(values) for _, values in found)
    padded = [(name, [*values, *[0.0] * (most - len(values))]) for name, values in found]
    return charts.bars([str(place + 1) for place in range(most)], padded, "accepted / rounds")


def _steps(comparison: ServedComparison) -> str | None:
    def shares(summary: ServedSummary) -> list[float]:
        total = sum((summary.counts.steps or {}).values()) or 1
        return [(summary.counts.steps or {}).get(path, 0) / total for path in paths]

    paths = ("specialized", "standard")
    found = [
        (name, shares(summary))
        for name, summary in zip(comparison.arm_names, comparison.summaries, strict=True)
        if summary.counts.coverage is not None
    ]
    return charts.bars(list(paths), found, "share of decode steps") if found else None
