"""A comparison of two servers as sections of text: the terminal's report, and the source of others.

Owns wording and layout. Computes no number. Results of different kinds (speculative or not,
synthetic, recorded or live replies) are tables of their own: `tables` has no way to join them. A
ratio is printed only when the comparison has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdecode.bench import report as in_process
from kdecode.bench.machine import Machine
from kdecode.bench.metrics import FORMULAS, SERVED_FORMULAS, SPECIALIZED, STANDARD, Spread
from kdecode.bench.report import divergence_lines
from kdecode.bench.serving.design import Outputs
from kdecode.bench.serving.facts import ServerFacts
from kdecode.bench.serving.protocol import ServedComparison
from kdecode.bench.serving.summary import ServedSummary
from kdecode.bench.tables import columns, estimate_text, legend, rate, spread_text
from kdecode.bench.verdicts import (
    COMPARED_SETTING,
    MIN_COVERAGE,
    Difference,
    is_not_exercised,
)
from kdecode.bench.wording import counted, ranks_text

# What only an engine inside of this process tells.
_IN_PROCESS = ("prefill", "prefill_tps", "output_tps")
_RESTARTS = {
    "never": "",
    "block": "; both servers started anew for each block",
    "arm": "; one server at a time, started anew for each turn of its arm",
}
SYNTHETIC_BANNER = (
    "SYNTHETIC ACCEPTANCE: drafts were accepted at stated rates, whatever they were. Times of "
    "steps mean something; the speed is no user's, the texts are no answers, and there are no "
    "scores."
)


@dataclass(frozen=True)
class Table:
    """Results of one kind. rows: label, a cell for each arm, and how it was obtained."""

    title: str
    banner: str | None
    arms: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def formulas() -> dict[str, str]:
    """Those of the names that stand in a report of servers."""
    every = {**FORMULAS, "n": "output tokens of a request, by the server's usage"}
    every |= SERVED_FORMULAS
    return {name: formula for name, formula in every.items() if name not in _IN_PROCESS}


def tables(comparison: ServedComparison) -> list[Table]:
    """One table where both arms gave results of one kind, else one for each."""
    kinds = [facts.study for facts in comparison.facts]
    groups = [(0, 1)] if kinds[0] == kinds[1] else [(0,), (1,)]
    replies = f"{comparison.workload.reply_mode} replies"
    found = []
    for arms in groups:
        kind = kinds[arms[0]]
        summaries = [comparison.summaries[arm] for arm in arms]
        found.append(
            Table(
                title=f"{kind}, {replies}, {comparison.workload.name}",
                banner=SYNTHETIC_BANNER if kind == "synthetic acceptance" else None,
                arms=tuple(comparison.arm_names[arm] for arm in arms),
                rows=tuple(_rows(summaries, has_drafts=kind != "non-speculative")),
            )
        )
    return found


def render(comparison: ServedComparison, machine: Machine) -> str:
    """The report for a terminal, as plain text."""
    sections = [
        header_lines(comparison, machine),
        *(_table_lines(table) for table in tables(comparison)),
        coverage_lines(comparison),
        output_lines(comparison),
        ratio_lines(comparison),
        verdict_lines(comparison),
        legend(formulas()),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _rows(summaries: Sequence[ServedSummary], *, has_drafts: bool) -> list[tuple[str, ...]]:
    def row(label: str, how: str, value: Callable[[ServedSummary], str]) -> tuple[str, ...]:
        return (label, *map(value, summaries), how)

    def spread(read: Callable[[ServedSummary], Spread | None]) -> Callable[[ServedSummary], str]:
        return lambda summary: spread_text(read(summary))

    rows = [
        row(
            "requests completed / planned",
            "measured passes",
            lambda s: f"{s.completed} / {s.planned}",
        ),
        row(
            "prompt / output tokens",
            "sums, the server's usage",
            lambda s: f"{_known(s.prompt_tokens)} / {s.output_tokens}",
        ),
        row("tokens counted by", "of a chunk", lambda s: "; ".join(s.token_sources) or "-"),
        row("prompt tokens from the caches", "hit_rate", lambda s: _percent(s.hit_rate)),
        row("time to first token P50 / P90", "ttft, any channel", spread(lambda s: s.ttft_s)),
        row("time to first answer token P50 / P90", "ttfa", spread(lambda s: s.ttfa_s)),
        row("DECODE THROUGHPUT, no prefill", "decode_tps_arm", lambda s: rate(s.decode_tps)),
        row("steady-state throughput", "decode_tps_steady", lambda s: rate(s.decode_tps_steady)),
        row("time per token P50 / P90", "tpot, per request", spread(lambda s: s.tpot_s)),
        row("chunk gaps P50 / P90", "icl, all gaps", spread(lambda s: s.icl_s)),
        row("tokens a chunk", "sum(n) / chunks", lambda s: _figure(s.tokens_per_chunk)),
        row("interactivity P50", "interactivity_p50", lambda s: rate(s.interactivity_p50)),
        row(
            "interactivity, slow tail P90",
            "interactivity_slow_p90",
            lambda s: rate(s.interactivity_slow_p90),
        ),
        row("request latency P50 / P90", "e2e", spread(lambda s: s.e2e_s)),
        row("output throughput, with prefill", "output_tps_run", lambda s: rate(s.output_tps)),
        row("peak throughput", "peak_tps", lambda s: rate(s.peak_tps)),
        row("prefill throughput", "prefill_tps_server", lambda s: _told_rate(s.prefill_tps)),
        row("decode step, mean", "step_time", lambda s: _milliseconds(s.counts.step_s)),
        row("client late to send P50 / P90", "queue", spread(lambda s: s.queue_s)),
        row("client late to wake P50 / P90", "event loop", spread(lambda s: s.lag_s)),
    ]
    if any(summary.goodput is not None for summary in summaries):
        rows.append(row("goodput", "goodput", lambda s: _percent(s.goodput)))
    if has_drafts:
        rows += [
            row(
                "tokens a round",
                "acceptance_length",
                lambda s: _figure(s.counts.acceptance_length),
            ),
            row("accepted drafts", "acceptance_rate", lambda s: _percent(s.counts.acceptance_rate)),
            row(
                "DERIVED time per token",
                "derived_tpot",
                lambda s: _milliseconds(s.counts.derived_tpot_s),
            ),
            row("rounds", "server's counter", lambda s: _known(s.counts.rounds)),
        ]
    return rows


def preflight_lines(
    names: tuple[str, str],
    facts: tuple[ServerFacts, ServerFacts],
    differences: Sequence[Difference],
    problems: Sequence[str],
) -> list[str]:
    """What can be said before anything is measured."""
    lines = []
    for name, one in zip(names, facts, strict=True):
        lines.append(f"{name}: {one.kind}, model {one.model}, {one.study}")
        lines += [f"  {setting}: {value!r}" for setting, value in sorted(one.config.items())]
        lines.append(f"  not told, so not compared: {', '.join(one.unchecked)}")
    lines += [f"differs: {d.setting}: {d.values[0]!r} | {d.values[1]!r}" for d in differences]
    lines += [f"problem: {problem}" for problem in problems]
    word = "not comparable" if differences or problems else "comparable"
    return [*lines, f"preflight: {word}"]


def header_lines(comparison: ServedComparison, machine: Machine) -> list[str]:
    design, workload = comparison.design, comparison.workload
    warmups = "; ".join(
        f"{name} {w.runs} passes" + ("" if w.is_stable else ", STILL UNSTABLE")
        for name, w in zip(comparison.arm_names, comparison.warmups, strict=True)
    )
    lines = [f"comparison {comparison.comparison_id}, {machine.date}"]
    for name, url, facts in zip(
        comparison.arm_names, comparison.urls, comparison.facts, strict=True
    ):
        backend = facts.config.get(COMPARED_SETTING, "not told")
        hardware = facts.config.get("hardware.name") or "hardware not told"
        ranks = ranks_text(facts.config) or ranks_text(facts.config, "parallel_config.")
        lines.append(
            f"{name}: {url}, {facts.kind}, model {facts.model}, {COMPARED_SETTING} {backend}, "
            f"{_known(facts.accelerators)} x {hardware}{ranks}"
        )
    lines += [
        f"client: {machine.cpu or 'cpu not known'}, {counted(machine.cores, 'core')}, "
        f"kdecode {machine.versions.get('kdecode')}, python {machine.versions.get('python')}",
        f"workload: {workload.name}, {counted(len(workload.requests), 'request')} in "
        f"{counted(len(workload.sessions()), 'session')}, {workload.reply_mode} replies, digest "
        f"{workload.digest}",
        f"design: {design.load}, {design.blocks} {design.order} blocks of 4 passes, greedy, seed "
        f"{design.seed}, caches: {design.cache}{_RESTARTS[design.restart]}",
        f"warm-up (discarded): {warmups}",
        _null_line(comparison),
    ]
    for name, facts in zip(comparison.arm_names, comparison.facts, strict=True):
        if facts.requested_length is not None:
            lines.append(
                f"synthetic acceptance of {name}: {facts.requested_length:.2f} tokens a round were "
                "asked for"
            )
    if design.limits.is_set:
        lines.append(f"limits of goodput: {design.limits}")
    unchecked = sorted({what for facts in comparison.facts for what in facts.unchecked})
    lines.append(f"not told by these servers, so not compared: {', '.join(unchecked) or 'nothing'}")
    return lines


def _null_line(comparison: ServedComparison) -> str:
    name = comparison.arm_names[0]
    if not comparison.design.has_null:
        return "null run: left out by request; nothing shows that this machine is quiet enough"
    if comparison.null is None:
        return f"null run of {name} against itself: no time per token"
    return f"null run of {name} against itself: {estimate_text('tpot', comparison.null)}"


def _table_lines(table: Table) -> list[str]:
    rows = [("", *table.arms, "how"), *table.rows]
    banner = [] if table.banner is None else [table.banner]
    return [f"table of {table.title}", *banner, *columns(rows)]


def coverage_lines(comparison: ServedComparison) -> list[str]:
    lines = []
    for name, summary in zip(comparison.arm_names, comparison.summaries, strict=True):
        steps = summary.counts.steps
        if steps is None or summary.counts.coverage is None:
            lines.append(f"coverage {name}: not available")
            continue
        lines.append(
            f"coverage {name}: {100 * summary.counts.coverage:.1f} % "
            f"({steps.get(SPECIALIZED, 0)} specialized, {steps.get(STANDARD, 0)} standard decode "
            "steps)"
        )
        reasons = sorted((summary.counts.fallback_reasons or {}).items(), key=lambda i: -i[1])
        lines += [f"  standard because: {reason}: {count}" for reason, count in reasons]
    return lines


def output_lines(comparison: ServedComparison) -> list[str]:
    outputs = comparison.outputs
    if outputs is None:
        if comparison.is_synthetic:
            return ["outputs: NOT VALID under synthetic acceptance; not compared"]
        return ["outputs: not compared, because the arms are not comparable"]
    agreement, judged = outputs.agreement, outputs.judged
    lines = [
        f"outputs: identical greedy replies to {agreement.identical_prompts} of "
        f"{counted(len(agreement.prompts), 'request')}, {agreement.near_ties} parted at a near-tie "
        f"(margin up to {outputs.near_tie:.3g} in ln p), {agreement.real} for real",
    ]
    for name, same, of in zip(comparison.arm_names, judged.identical, judged.compared, strict=True):
        lines.append(f"timed replies of {name} like its own reply alone: {same} of {of}")
    return [*lines, *divergence_lines(agreement, "request"), *_forced_lines(comparison, outputs)]


def _forced_lines(comparison: ServedComparison, outputs: Outputs) -> list[str]:
    """What the prompts' paths say; it decides nothing."""
    baseline, candidate = comparison.arm_names
    found, forced = outputs.calibration, outputs.forced
    if found is None:
        lines = [f"near-tie not calibrated: {baseline} tells no logprobs of prompts by token id"]
    else:
        lines = [
            f"calibration: ln p of a token differs by up to {found.largest:.3g} between the decode "
            f"and the prompt path of {baseline} ({found.positions:,} positions), so a margin by up "
            f"to {found.near_tie:.3g}; a near-tie is {outputs.near_tie:.3g} here"
        ]
    if forced is not None:
        lines.append(
            f"teacher-forced: given the replies of {baseline}, {candidate} (its prompt path) "
            f"prefers another token at {forced.other} of {forced.positions:,} positions, "
            f"{forced.beyond} beyond a near-tie, by up to {forced.widest:.3g} in ln p"
        )
    return lines


def ratio_lines(comparison: ServedComparison) -> list[str]:
    return in_process.ratio_lines(
        comparison.arm_names,
        comparison.ratios,
        comparison.unequal_pairs,
        comparison.design.blocks,
    )


def verdict_lines(comparison: ServedComparison) -> list[str]:
    baseline, candidate = comparison.arm_names
    lines = [f"verdict: {comparison.verdict} (exit code {comparison.exit_code})"]
    if comparison.verdict == "not comparable":
        if comparison.differences:
            lines.append(
                f"the arms differ in more than {COMPARED_SETTING}, so there is no ratio; "
                f"differences ({baseline} | {candidate}):"
            )
            lines += [
                f"  {d.setting}: {d.values[0]!r} | {d.values[1]!r}" for d in comparison.differences
            ]
        lines += [f"  {problem}" for problem in comparison.problems]
    elif comparison.verdict == "outputs differ":
        lines.append("the speeds above are unqualified: both arms must say the same first.")
    elif comparison.verdict == "not exercised":
        lines += _exercise_lines(comparison)
    else:
        lines.append(f"about {candidate} against {baseline}, from the interval of tpot.")
    return lines


def _exercise_lines(comparison: ServedComparison) -> list[str]:
    lines = []
    for name, facts, summary in zip(
        comparison.arm_names, comparison.facts, comparison.summaries, strict=True
    ):
        coverage = summary.counts.coverage
        if is_not_exercised(facts.config, coverage):
            share = "an unknown share" if coverage is None else f"{100 * coverage:.1f} %"
            lines.append(
                f"specialised path not exercised: {share} of the decode steps of {name}; "
                f"{100 * MIN_COVERAGE:.0f} % are needed; see the reasons under coverage."
            )
    return lines


def _known(value: int | None) -> str:
    return "not available" if value is None else str(value)


def _told_rate(value: float | None) -> str:
    return "not available" if value is None else rate(value)


def _figure(value: float | None) -> str:
    return "not available" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "not available" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "not available" if value is None else f"{1e3 * value:.3f} ms"
