"""When a ratio may be printed, and what it says: the gate, the ratios of pairs, the verdict.

Owns the one setting that two arms may differ in, the verdicts with their exit codes, and which
times of a pair are divided. Does not know how arms are run, in this process or behind a URL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kdecode.bench.metrics import RequestMetrics
from kdecode.bench.statistics import RatioEstimate, estimate_ratio

# The only setting that the two arms of a ratio may differ in.
COMPARED_SETTING = "decode_backend"
SPECIALIZED_BACKEND = "latency_specialized"

# The least share of decode steps that must have run specialized for a speed verdict.
MIN_COVERAGE = 0.9

Verdict = Literal[
    "faster",
    "slower",
    "no difference seen at this size",
    "not comparable",
    "outputs differ",
    "not exercised",
]
EXIT_CODES: Mapping[Verdict, int] = {
    "faster": 0,
    "slower": 0,
    "no difference seen at this size": 0,
    "not comparable": 3,
    "outputs differ": 4,
    "not exercised": 5,
}

# (baseline, candidate) of every pair, block by block.
Pairs = Sequence[Sequence[tuple[RequestMetrics, RequestMetrics]]]


@dataclass(frozen=True)
class Difference:
    """A setting that keeps two arms from being compared; None stands for an absent setting."""

    setting: str
    values: tuple[Any, Any]


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Settings that differ besides `decode_backend`, by dotted name."""
    flat_a, flat_b = dict(flatten(a)), dict(flatten(b))
    for config in (flat_a, flat_b):
        if COMPARED_SETTING not in config:
            raise ValueError(f"A resolved configuration has no {COMPARED_SETTING!r}: {config}.")
    return tuple(
        Difference(name, (flat_a.get(name), flat_b.get(name)))
        for name in sorted(flat_a.keys() | flat_b.keys())
        if name != COMPARED_SETTING
        and (name not in flat_a or name not in flat_b or flat_a[name] != flat_b[name])
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unequal_pairs(pairs: Pairs) -> int:
    """Pairs whose arms made different numbers of tokens."""
    return sum(a.n != b.n for block in pairs for a, b in block)


def tpot_pairs(pairs: Pairs) -> list[list[tuple[float, float]]]:
    """Times per token of the pairs in which both arms have one, block by block.

    An arm has none for a reply of one token, or of which everything arrived at once.
    """
    return [
        [(a.tpot_s, b.tpot_s) for a, b in block if a.tpot_s is not None and b.tpot_s is not None]
        for block in pairs
    ]


def ratios(pairs: Pairs, seed: int) -> dict[str, RatioEstimate]:
    """tpot and ttft; e2e only where both arms of every pair made equally many tokens.

    ValueError where tpot is defined for the pairs of fewer than two blocks.
    """
    found = {
        "tpot": estimate_ratio(tpot_pairs(pairs), seed),
        "ttft": estimate_ratio([[(a.ttft_s, b.ttft_s) for a, b in block] for block in pairs], seed),
    }
    if unequal_pairs(pairs) == 0:
        e2e = [[(a.e2e_s, b.e2e_s) for a, b in block] for block in pairs]
        found["e2e"] = estimate_ratio(e2e, seed)
    return found


def is_not_exercised(config: Mapping[str, Any], coverage: float | None) -> bool:
    """Whether an arm was to run specialised, and did so for too few of its steps, if at all."""
    if config.get(COMPARED_SETTING) != SPECIALIZED_BACKEND:
        return False
    return coverage is None or coverage < MIN_COVERAGE


def speed_verdict(tpot: RatioEstimate) -> Verdict:
    if tpot.low > 1:
        return "faster"
    if tpot.high < 1:
        return "slower"
    return "no difference seen at this size"
