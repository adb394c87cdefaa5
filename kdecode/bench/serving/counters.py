"""What a server counted while an arm was measured: /metrics before and after.

Owns reading the exposition format and which counters mean what. A counter that is not there gives
None, never 0, and no count is made up from another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdecode.bench.metrics import SPECIALIZED, STANDARD

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# A counter's name and labels.
Key = tuple[str, frozenset[tuple[str, str]]]


def read_counters(text: str) -> dict[Key, float]:
    """Every sample of an exposition; lines that are none are left out."""
    found = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found[(match[1], frozenset(_LABEL.findall(match[2] or "")))] = value
    return found


def growth(before: Mapping[Key, float], after: Mapping[Key, float]) -> dict[Key, float]:
    """By how much each counter has grown; one that is new began at 0."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


@dataclass(frozen=True)
class ServerCounts:
    """One arm's counters over its measured passes. None: the server does not tell.

    steps, fallback_reasons: decode steps by path and, of the standard ones, by reason. step_s: mean
    time of a decode step. rounds, drafted, accepted: of speculative decoding. prefill_s: time of
    all requests' prefills.
    """

    steps: Mapping[str, int] | None = None
    fallback_reasons: Mapping[str, int] | None = None
    step_s: float | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_by_place: tuple[int, ...] | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    generated: int | None = None
    prefill_s: float | None = None

    @property
    def coverage(self) -> float | None:
        total = sum((self.steps or {}).values())
        return (self.steps or {}).get(SPECIALIZED, 0) / total if total else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round, the bonus included; None without rounds or without their counters."""
        if not self.rounds or self.accepted is None:
            return None
        return 1 + self.accepted / self.rounds

    @property
    def derived_tpot_s(self) -> float | None:
        """One request at a time would wait this long for a token; of a mean step and round."""
        length = self.acceptance_length
        return None if self.step_s is None or length is None else self.step_s / length

    @property
    def acceptance_rate(self) -> float | None:
        if not self.drafted or self.accepted is None:
            return None
        return self.accepted / self.drafted


def add_up(passes: Sequence[Mapping[Key, float]]) -> ServerCounts:
    """The counts of an arm from the growth in each of its passes."""
    total: Counter[Key] = Counter()
    for one in passes:
        total.update(one)
    if not total:
        return ServerCounts()
    steps = _by(total, "kdecode:decode_steps_total", "path")
    reasons = _by(total, "kdecode:decode_steps_total", "reason", path=STANDARD)
    places = _by(total, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    return ServerCounts(
        steps=None if steps is None else {path: round(n) for path, n in steps.items()},
        fallback_reasons=(
            None if reasons is None else {name: round(n) for name, n in reasons.items() if n}
        ),
        step_s=_step_s(total),
        rounds=_whole(total, "vllm:spec_decode_num_drafts_total"),
        drafted=_whole(total, "vllm:spec_decode_num_draft_tokens_total"),
        accepted=_whole(total, "vllm:spec_decode_num_accepted_tokens_total"),
        accepted_by_place=(
            None
            if places is None
            else tuple(round(places[place]) for place in sorted(places, key=int))
        ),
        prefix_queries=_whole(total, "vllm:prefix_cache_queries_total"),
        prefix_hits=_whole(total, "vllm:prefix_cache_hits_total"),
        generated=_whole(total, "vllm:generation_tokens_total"),
        prefill_s=_sum(total, "vllm:request_prefill_time_seconds_sum"),
    )


def _step_s(total: Mapping[Key, float]) -> float | None:
    seconds = _sum(total, "kdecode:step_time_seconds_sum", kind="decode")
    count = _sum(total, "kdecode:step_time_seconds_count", kind="decode")
    return seconds / count if seconds is not None and count else None


def _matching(total: Mapping[Key, float], name: str, **labels: str) -> list[tuple[Key, float]]:
    wanted = set(labels.items())
    return [(key, value) for key, value in total.items() if key[0] == name and wanted <= key[1]]


def _sum(total: Mapping[Key, float], name: str, **labels: str) -> float | None:
    found = _matching(total, name, **labels)
    return sum(value for _, value in found) if found else None


def _whole(total: Mapping[Key, float], name: str) -> int | None:
    value = _sum(total, name)
    return None if value is None else round(value)


def _by(
    total: Mapping[Key, float], name: str, label: str, **labels: str
) -> dict[str, float] | None:
    found: Counter[str] = Counter()
    matching = _matching(total, name, **labels)
    for (_, pairs), value in matching:
        found[dict(pairs).get(label, "")] += value
    return dict(found) if matching else None
