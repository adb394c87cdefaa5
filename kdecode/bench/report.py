"""A comparison as a terminal report and as `comparison.json`.

Owns wording and layout. Computes no number: every figure comes from `Comparison` and names the
formula that made it. A ratio is printed only when the comparison has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdecode.bench.agreement import Agreement
from kdecode.bench.compare import Comparison
from kdecode.bench.machine import Machine
from kdecode.bench.metrics import FORMULAS, SPECIALIZED, STANDARD, ArmSummary, Spread
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.tables import columns, estimate_text, legend, plain, rate, spread_text
from kdecode.bench.verdicts import COMPARED_SETTING, MIN_COVERAGE, flatten
from kdecode.bench.wording import counted, ranks_text

SCHEMA_VERSION = 1
RECOMMENDED_BLOCKS = 6

RATIO_LABELS = {
    "tpot": "decode speed (time per token)",
    "ttft": "time to first token",
    "e2e": "request latency",
}


def to_json(comparison: Comparison, machine: Machine) -> dict[str, Any]:
    """Everything of a comparison as plain JSON values: records, configurations, formulas."""
    fields = {
        field.name: plain(getattr(comparison, field.name))
        for field in dataclasses.fields(comparison)
    }
    coverages = [summary.coverage for summary in comparison.summaries]
    for summary, coverage in zip(fields["summaries"], coverages, strict=True):
        summary["coverage"] = coverage
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": comparison.exit_code,
        "formulas": dict(FORMULAS),
        "machine": plain(machine),
        **fields,
    }


def render(comparison: Comparison, machine: Machine) -> str:
    """The report for a terminal, as plain text."""
    sections = [
        _header(comparison, machine),
        _measured_table(comparison, machine),
        _coverage_lines(comparison),
        _agreement_lines(comparison),
        ratio_lines(
            comparison.arm_names,
            comparison.ratios,
            comparison.unequal_pairs,
            comparison.settings.blocks,
        ),
        _verdict_lines(comparison),
        legend(FORMULAS),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _header(comparison: Comparison, machine: Machine) -> list[str]:
    settings = comparison.settings
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    used = [
        f"{name}: {_configured(dict(flatten(config)))}"
        for name, config in zip(comparison.arm_names, comparison.configs, strict=True)
    ]
    warmups = "; ".join(
        f"{name} {counted(warmup.runs, 'run')}" + ("" if warmup.is_stable else ", STILL UNSTABLE")
        for name, warmup in zip(comparison.arm_names, comparison.warmups, strict=True)
    )
    prompts = len({run.prompt for run in comparison.runs})
    return [
        f"comparison {comparison.comparison_id}, {machine.date}",
        f"machine: {machine.cpu or 'cpu not known'}, {counted(machine.cores, 'core')}, "
        f"{' '.join(machine.cpu_flags) or 'no flags known'}, {machine.system}",
        f"software: {versions}",
        *used,
        f"design: {counted(prompts, 'prompt')}, {settings.blocks} {settings.order} blocks, "
        f"max_tokens {settings.max_tokens}, greedy, seed {settings.seed}, one request at a time, "
        f"{_speculation(comparison)}, prompts sha256 {comparison.prompts_sha256[:12]}",
        f"warm-up (discarded): {warmups}",
    ]


def _configured(config: Mapping[str, Any]) -> str:
    """What decides speed, of a resolved configuration by dotted name; `to_json` has all of it."""
    told = [
        f"{label} {config.get(name, 'not reported')}"
        for label, name in (
            ("device", "device"),
            ("threads", "threads"),
            ("isa", "isa"),
            ("latent cache", "cache.dtype"),
        )
    ]
    return ", ".join([str(config[COMPARED_SETTING]), *told]) + ranks_text(config)


def _speculation(comparison: Comparison) -> str:
    resolved = comparison.configs[0].get("speculative")
    if resolved is None:
        return "speculation none"
    text = f"speculation {resolved['method']} with {resolved['num_speculative_tokens']} drafts"
    return f"{text}, SYNTHETIC acceptance" if comparison.is_synthetic else text


def _measured_table(comparison: Comparison, machine: Machine) -> list[str]:
    def row(label: str, how: str, value: Callable[[ArmSummary], str]) -> tuple[str, ...]:
        a, b = comparison.summaries
        return (label, value(a), value(b), how)

    def spread(read: Callable[[ArmSummary], Spread | None]) -> Callable[[ArmSummary], str]:
        return lambda summary: spread_text(read(summary))

    rows = [
        ("", *comparison.arm_names, "how"),
        row("requests", "measured runs", lambda s: f"{s.num_requests}"),
        row("prompt / output tokens", "sums", lambda s: f"{s.prompt_tokens} / {s.output_tokens}"),
        row("prefill time P50 / P90", "prefill", spread(lambda s: s.prefill_s)),
        row("prefill throughput", "prefill_tps", lambda s: rate(s.prefill_tps)),
        row("time to first token P50 / P90", "ttft", spread(lambda s: s.ttft_s)),
        row("DECODE THROUGHPUT, no prefill", "decode_tps_arm", lambda s: rate(s.decode_tps)),
        row("time per token P50 / P90", "tpot, per request", spread(lambda s: s.tpot_s)),
        row("chunk gaps P50 / P90", "icl, all gaps", spread(lambda s: s.icl_s)),
        row("interactivity P50", "interactivity_p50", lambda s: rate(s.interactivity_p50)),
        row(
            "interactivity, slow tail P90",
            "interactivity_slow_p90",
            lambda s: rate(s.interactivity_slow_p90),
        ),
        row("request latency P50 / P90", "e2e", spread(lambda s: s.e2e_s)),
        row("output throughput, with prefill", "output_tps", lambda s: rate(s.output_tps)),
    ]
    ranks = max(config.get("tensor_parallel_size", 1) for config in comparison.configs)
    whose = "the process" if ranks == 1 else "rank 0"
    peak = (
        f"peak resident memory of {whose} (both arms together): "
        f"{machine.peak_rss_bytes / 2**20:.0f} MiB"
    )
    return [*columns(rows), peak]


def _coverage_lines(comparison: Comparison) -> list[str]:
    lines = []
    for name, summary in zip(comparison.arm_names, comparison.summaries, strict=True):
        steps = summary.decode_steps
        share = "not available" if summary.coverage is None else f"{100 * summary.coverage:.1f} %"
        lines.append(
            f"coverage {name}: {share} ({steps.get(SPECIALIZED, 0)} specialized, "
            f"{steps.get(STANDARD, 0)} standard decode steps)"
        )
        reasons = sorted(summary.fallback_reasons.items(), key=lambda item: -item[1])
        lines += [f"  standard because: {reason}: {count}" for reason, count in reasons]
    return lines


def _agreement_lines(comparison: Comparison) -> list[str]:
    agreement = comparison.agreement
    if agreement is None:
        if comparison.is_synthetic:
            return [
                "outputs: NOT VALID: drafts were accepted at stated rates, whatever they were, so "
                "that no text is an answer of the model; not compared"
            ]
        return ["outputs: not checked, because the arms are not comparable"]
    reference, candidate = comparison.arm_names
    near_tie = comparison.settings.near_tie
    lines = [
        f"outputs: identical greedy tokens in {agreement.identical_prompts} of "
        f"{counted(len(agreement.prompts), 'prompt')}",
        f"teacher-forced on the tokens of {reference}: {candidate} chose another token at "
        f"{agreement.near_ties + agreement.real} of {agreement.positions} positions "
        f"({counted(agreement.near_ties, 'near-tie')}, {agreement.real} real); a near-tie has a "
        f"margin up to {near_tie.atol:g} + {near_tie.rtol:g} * |max logit|",
    ]
    if agreement.unstable_runs:
        lines.append(
            f"repetitions with other tokens than the first run of the same arm: "
            f"{agreement.unstable_runs}"
        )
    return lines + list(divergence_lines(agreement, "prompt"))


def divergence_lines(agreement: Agreement, noun: str) -> Iterable[str]:
    """Where texts part. noun: what they were replies to."""
    for prompt in agreement.prompts:
        if prompt.divergence is not None:
            margin = prompt.divergence_margin
            yield (
                f"  {noun} {prompt.prompt}: first difference at token {prompt.divergence}, "
                f"{prompt.divergence_class}, margin "
                f"{'not available' if margin is None else format(margin, '.4g')}"
            )


def ratio_lines(
    arm_names: tuple[str, str],
    ratios: Mapping[str, RatioEstimate],
    unequal_pairs: int,
    blocks: int,
) -> list[str]:
    """Every ratio with its interval, and what limits them; [] where no ratio was taken."""
    if not ratios:
        return []
    baseline, candidate = arm_names
    lines = [f"ratios {baseline} / {candidate}, above 1: {candidate} is faster"]
    for metric, estimate in ratios.items():
        lines.append(f"  {RATIO_LABELS[metric]}: {estimate_text(metric, estimate)}")
    if unequal_pairs:
        lines.append(
            f"  no ratio of request latency: in {counted(unequal_pairs, 'pair')} the "
            f"arms made different numbers of tokens"
        )
    if blocks < RECOMMENDED_BLOCKS:
        lines.append(f"  only {blocks} blocks; {RECOMMENDED_BLOCKS} or more are recommended")
    return lines


def _verdict_lines(comparison: Comparison) -> list[str]:
    baseline, candidate = comparison.arm_names
    lines = [f"verdict: {comparison.verdict} (exit code {comparison.exit_code})"]
    if comparison.verdict == "not comparable":
        lines.append(
            f"the arms differ in more than {COMPARED_SETTING}, so there is no ratio; differences "
            f"({baseline} | {candidate}):"
        )
        lines += [
            f"  {d.setting}: {d.values[0]!r} | {d.values[1]!r}" for d in comparison.differences
        ]
    elif comparison.verdict == "outputs differ":
        lines.append("the speeds above are unqualified: both arms must say the same first.")
    elif comparison.verdict == "not exercised":
        lines.append(
            f"the specialized path ran less than {100 * MIN_COVERAGE:.0f} % of the decode steps, "
            f"so these runs say nothing about it; see the reasons under coverage."
        )
    else:
        lines.append(f"about {candidate} against {baseline}, from the interval of tpot.")
    return lines
