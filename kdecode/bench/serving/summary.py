"""The requests of one arm behind a URL, added up by the definitions of `bench.metrics`.

Owns what needs more than one request: windows of passes, goodput, what was planned and what came.
Does not know which arm it is compared with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdecode.bench.metrics import RequestMetrics, Spread, divide, optional_spread
from kdecode.bench.serving.client import ServedRecord
from kdecode.bench.serving.counters import ServerCounts
from kdecode.bench.serving.load import PassResult


@dataclass(frozen=True)
class Limits:
    """What a good request keeps to, in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __str__(self) -> str:
        named = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return ", ".join(f"{k} <= {1e3 * v:g} ms" for k, v in named.items() if v is not None)

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))

    def is_good(self, request: RequestMetrics) -> bool:
        """A limit on what is not defined for the request is not kept."""
        pairs = (
            (self.ttft_s, request.ttft_s),
            (self.tpot_s, request.tpot_s),
            (self.e2e_s, request.e2e_s),
        )
        return all(limit is None or (v is not None and v <= limit) for limit, v in pairs)


@dataclass(frozen=True)
class ServedSummary:
    """One arm. None: not defined for these requests, or not told by the server."""

    planned: int
    sent: int
    completed: int
    errors: Mapping[str, int]
    prompt_tokens: int | None
    output_tokens: int
    hit_rate: float | None
    token_sources: tuple[str, ...]
    finish_reasons: Mapping[str, int]
    ttft_s: Spread | None
    ttfa_s: Spread | None
    e2e_s: Spread | None
    tpot_s: Spread | None
    icl_s: Spread | None
    queue_s: Spread | None
    lag_s: Spread | None
    tokens_per_chunk: float | None
    decode_tps: float | None
    decode_tps_steady: float | None
    output_tps: float | None
    peak_tps: float | None
    prefill_tps: float | None
    goodput: float | None
    counts: ServerCounts

    @property
    def interactivity_p50(self) -> float | None:
        return None if self.tpot_s is None else divide(1.0, self.tpot_s.p50)

    @property
    def interactivity_slow_p90(self) -> float | None:
        return None if self.tpot_s is None else divide(1.0, self.tpot_s.p90)


def summarize_passes(
    passes: Sequence[PassResult], counts: ServerCounts, limits: Limits, concurrency: int
) -> ServedSummary:
    """Aggregates of an arm. concurrency: requests in flight while its load is steady."""
    records = [record for one in passes for record in one.records]
    requests = [metrics for r in records if (metrics := r.metrics()) is not None]
    replies = [record.reply for record in records if record.reply is not None]
    prompts = [reply.prompt_tokens for reply in replies]
    cached = [reply.cached_tokens for reply in replies]
    planned = sum(one.planned for one in passes)
    output_tokens = sum(request.n for request in requests)
    prompt_tokens = None if None in prompts else sum(filter(None, prompts))
    cached_tokens = None if None in cached else sum(filter(None, cached))
    return ServedSummary(
        planned=planned,
        sent=len(records),
        completed=len(requests),
        errors=Counter(record.error for record in records if record.error is not None),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_rate=_share(cached_tokens, prompt_tokens),
        token_sources=tuple(sorted({reply.token_source for reply in replies})),
        finish_reasons=Counter(str(reply.finish_reason) for reply in replies),
        ttft_s=optional_spread([request.ttft_s for request in requests]),
        ttfa_s=optional_spread([r.answer_s for r in records if r.answer_s is not None]),
        e2e_s=optional_spread([request.e2e_s for request in requests]),
        tpot_s=optional_spread([r.tpot_s for r in requests if r.tpot_s is not None]),
        icl_s=optional_spread([gap for request in requests for gap in request.icl_s]),
        queue_s=optional_spread([r.queue_s for r in requests if r.queue_s is not None]),
        lag_s=optional_spread([lag for one in passes for lag in one.lags_s]),
        tokens_per_chunk=divide(output_tokens, sum(len(r.icl_s) + 1 for r in requests)),
        decode_tps=divide(
            sum(request.decoded for request in requests),
            sum(request.decode_s for request in requests if request.decoded),
        ),
        decode_tps_steady=_steady(passes, concurrency),
        output_tps=divide(output_tokens, sum(_seconds(one) for one in passes)),
        peak_tps=_peak(passes),
        prefill_tps=_prefill(prompt_tokens, cached_tokens, counts),
        goodput=(divide(sum(map(limits.is_good, requests)), planned) if limits.is_set else None),
        counts=counts,
    )


def _seconds(one: PassResult) -> float:
    return (one.end_ns - one.begin_ns) / 1e9


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _prefill(prompt: int | None, cached: int | None, counts: ServerCounts) -> float | None:
    if prompt is None or cached is None or counts.prefill_s is None:
        return None
    return divide(prompt - cached, counts.prefill_s)


def _tokens(records: Sequence[ServedRecord]) -> list[tuple[int, int]]:
    """(time, tokens) of every chunk whose tokens are known."""
    return [
        chunk
        for record in records
        if record.timing is not None and record.timing.chunk_tokens is not None
        for chunk in zip(record.timing.chunk_ns, record.timing.chunk_tokens, strict=True)
    ]


def _steady(passes: Sequence[PassResult], concurrency: int) -> float | None:
    """Throughput while the load is complete: no first prefill and no drain inside of it."""
    tokens, seconds = 0, 0.0
    for one in passes:
        done = sorted(
            (record for record in one.records if record.timing is not None),
            key=lambda record: record.send_ns,
        )
        if not done:
            continue
        timings = [record.timing for record in done if record.timing is not None]
        begin = max(timing.chunk_ns[0] for timing in timings[:concurrency])
        end = min(timing.chunk_ns[-1] for timing in timings[-concurrency:])
        if end > begin:
            tokens += sum(number for at, number in _tokens(done) if begin < at <= end)
            seconds += (end - begin) / 1e9
    return divide(tokens, seconds)


def _peak(passes: Sequence[PassResult]) -> float | None:
    """Parts of equal length, so that the fullest one has at least the mean of its pass."""
    best = 0.0
    for one in passes:
        length_ns = one.end_ns - one.begin_ns
        if length_ns <= 0:
            continue
        parts = math.ceil(length_ns / 1e9)
        counts: Counter[int] = Counter()
        for at, number in _tokens(one.records):
            place = (at - one.begin_ns) * parts // length_ns
            counts[min(parts - 1, place)] += number
        best = max(best, max(counts.values(), default=0) * parts / (length_ns / 1e9))
    return best or None
