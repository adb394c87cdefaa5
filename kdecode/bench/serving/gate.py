"""What keeps two measured servers from having a ratio, in sentences.

Owns the rules of comparability and of validity. Does not know how the runs were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kdecode.bench.serving.facts import ServerFacts
from kdecode.bench.serving.summary import ServedSummary
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.verdicts import (
    COMPARED_SETTING,
    Difference,
    Pairs,
    config_differences,
    tpot_pairs,
)

# Shares of prompt tokens that came from the caches may differ by this much between arms.
MAX_HIT_DIFFERENCE = 0.02
# The client's lateness, P90, against the median latency of requests.
MAX_LAG_SHARE = 0.1
# Synthetic acceptance may miss what was asked for by this, or by what so few rounds explain.
MAX_LENGTH_MISS = 0.05


def facts_differences(a: ServerFacts, b: ServerFacts) -> tuple[Difference, ...]:
    """Settings in which the servers differ besides the backend."""
    if a.kind != b.kind:
        return (Difference("server", (a.kind, b.kind)),)
    configs = [{COMPARED_SETTING: None, **facts.config} for facts in (a, b)]
    return config_differences(*configs)


def configuration_problems(names: tuple[str, str], facts: Sequence[ServerFacts]) -> Iterator[str]:
    for name, one in zip(names, facts, strict=True):
        if one.unread:
            hint = "; a vLLM tells with VLLM_SERVER_DEV_MODE=1" if one.kind == "vllm" else ""
            yield f"{name} does not tell what must be equal: {', '.join(one.unread)}{hint}."
    counts = [one.accelerators for one in facts]
    if None not in counts and counts[0] != counts[1]:
        yield (
            f"The arms ran on {counts[0]} and {counts[1]} devices; per-GPU division does not "
            "isolate the backend."
        )
    if facts[0].study != facts[1].study:
        yield (
            f"One arm is {facts[0].study} and the other {facts[1].study}; results of different "
            "kinds are never in one table."
        )


def run_problems(
    names: tuple[str, str],
    facts: Sequence[ServerFacts],
    summaries: Sequence[ServedSummary],
    pairs: Pairs,
) -> Iterator[str]:
    """What the runs themselves show."""
    for name, one, summary in zip(names, facts, summaries, strict=True):
        if summary.completed != summary.planned:
            yield (
                f"{name}: {summary.planned} requests were planned, {summary.sent} sent and "
                f"{summary.completed} completed; runs with losses have no ratio."
            )
        if summary.completed and summary.tpot_s is None:
            yield (
                f"{name}: time per token is not defined: replies are one chunk, or the tokens of "
                f"chunks are not known (counted by {', '.join(summary.token_sources)})."
            )
        yield from _lag_problems(name, summary)
        yield from _acceptance_problems(name, one, summary)
    rates = [summary.hit_rate for summary in summaries]
    if rates[0] is not None and rates[1] is not None:
        if abs(rates[0] - rates[1]) > MAX_HIT_DIFFERENCE:
            yield (
                f"{100 * rates[0]:.1f} % and {100 * rates[1]:.1f} % of the prompt tokens came from "
                f"the caches; the arms may differ by {100 * MAX_HIT_DIFFERENCE:g} points."
            )
    elif (rates[0] is None) != (rates[1] is None):
        yield "One arm tells its cached prompt tokens and the other does not."
    prompts = [summary.prompt_tokens for summary in summaries]
    if all(summary.completed == summary.planned for summary in summaries) and (
        prompts[0] != prompts[1]
    ):
        yield f"The same requests had {prompts[0]} and {prompts[1]} prompt tokens."
    # Where an arm has no times at all, that was said above.
    timed = tpot_pairs(pairs)
    if all(summary.tpot_s is not None for summary in summaries) and sum(map(bool, timed)) < 2:
        yield (
            f"{sum(map(len, timed))} of {sum(map(len, pairs))} pairs, in {sum(map(bool, timed))} "
            f"of {len(pairs)} blocks, have a time per token on both sides: replies were one "
            "token, or arrived all at once; a ratio needs pairs of at least 2 blocks."
        )


def _lag_problems(name: str, summary: ServedSummary) -> Iterator[str]:
    if summary.e2e_s is None:
        return
    limit = MAX_LAG_SHARE * summary.e2e_s.p50
    for what, found in (("sent requests", summary.queue_s), ("woke up", summary.lag_s)):
        if found is not None and found.p90 > limit:
            yield (
                f"{name}: the client was the limit: it {what} {1e3 * found.p90:.1f} ms late (P90); "
                f"{1e3 * limit:.1f} ms are allowed, {100 * MAX_LAG_SHARE:g} % of the median e2e."
            )


def _acceptance_problems(name: str, facts: ServerFacts, summary: ServedSummary) -> Iterator[str]:
    """Synthetic acceptance has to be what was asked for."""
    asked = facts.requested_length
    if asked is None:
        return
    found = summary.counts.acceptance_length
    if found is None:
        yield (
            f"{name}: synthetic acceptance of {asked:.2f} tokens a round was asked for, and its "
            "counters are not available."
        )
        return
    rounds = summary.counts.rounds or 1
    allowed = max(MAX_LENGTH_MISS * asked, 3 * math.sqrt(asked / rounds))
    if abs(found - asked) > allowed:
        yield (
            f"{name}: synthetic acceptance of {asked:.2f} tokens a round was asked for and "
            f"{found:.2f} were found in {rounds} rounds."
        )


def null_problem(name: str, tpot: RatioEstimate) -> str | None:
    """A null run that sees a difference says that the machine is too noisy to measure on."""
    if tpot.low <= 1 <= tpot.high:
        return None
    return (
        f"The null run of {name} against itself found a ratio of {tpot.ratio:.3f} "
        f"[{tpot.low:.3f}, {tpot.high:.3f}], which leaves out 1; nothing can be measured here now."
    )
