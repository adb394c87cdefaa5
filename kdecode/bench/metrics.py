"""THE definitions of what is measured: of one request, of the requests of one arm.

Owns the formulas (`FORMULAS` and `SERVED_FORMULAS`, printed in reports) and the record of one
measured generation. Does not know statistics over repetitions, arms or how a generation is run.
Times come in as integer nanoseconds of one monotonic clock and are differenced before they become
seconds; a quantity that is not defined is None, never 0.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SPECIALIZED = "specialized"
STANDARD = "standard"

AcceptanceSource = Literal["none", "model", "synthetic"]

# Below this many values a 99th percentile is an extrapolation from a handful of them.
MIN_VALUES_P99 = 300

FORMULAS: Mapping[str, str] = {
    "n": "output tokens of a request, counted as token ids",
    "f": "tokens in the first output chunk; tokens that arrive together are one chunk",
    "ttft": "t_first_chunk - t_send",
    "e2e": "t_last_chunk - t_send (request latency)",
    "decode_s": "t_last_chunk - t_first_chunk",
    "decode_tps": "(n - f) / decode_s; undefined when n = f",
    "tpot": "decode_s / (n - f); undefined when n = f",
    "tpot_n1": "decode_s / (n - 1); undefined when n = 1",
    "ntpot": "e2e / n",
    "e2e_tps": "n / e2e",
    "icl": "gaps between one chunk and the next",
    "prefill": "time inside the prefill steps of a request",
    "prefill_tps": "sum(prompt tokens) / sum(prefill)",
    "decode_tps_arm": "sum(n - f) / sum(decode_s) over the requests with n > f; excludes prefill",
    "output_tps": "sum(n) / sum(e2e), requests one after another; prefill is inside",
    "interactivity_p50": "1 / P50(tpot)",
    "interactivity_slow_p90": "1 / P90(tpot), the slow tail",
    "coverage": "specialized decode steps / all decode steps",
    "percentile": "linear interpolation between closest ranks",
}
# What only servers have, which serve several requests at a time and count for themselves.
SERVED_FORMULAS: Mapping[str, str] = {
    "ttfa": "first text outside of the reasoning - t_send",
    "queue": "t_send - t_intended, where the load is scheduled",
    "output_tps_run": "sum(n) / (t_end - t_begin) of the passes; prefill and queues are inside",
    "decode_tps_steady": "tokens between the first token of the last request that starts at the "
    "beginning and the first end of the last ones, over that time",
    "peak_tps": "most tokens in one of the equal parts of a pass, of at most 1 s each",
    "prefill_tps_server": "uncached prompt tokens / time in prefill by the server's histogram",
    "goodput": "requests within every limit / requests planned",
    "hit_rate": "cached prompt tokens / prompt tokens, by the server's usage",
    "acceptance_length": "1 + accepted drafts / rounds, the bonus included",
    "acceptance_rate": "accepted drafts / proposed drafts; falls with their number by itself",
    "step_time": "time of a decode step, by the server's histogram",
    "derived_tpot": "step_time / acceptance_length; DERIVED from the server's means, not measured",
}


class MetricError(ValueError):
    """A measurement that the definitions do not cover; the message says which and why."""


@dataclass(frozen=True)
class RequestTiming:
    """Arrival times of one request's output chunks, on one clock.

    send_ns: the request was sent. intended_ns: when it should have been sent, where the load is
    scheduled. A chunk's tokens arrive together. chunk_tokens: None where a server tells the sum
    alone, total_tokens; then nothing per token after the first chunk is defined.
    """

    send_ns: int
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...] | None
    intended_ns: int | None = None
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        counts = self.chunk_tokens
        if counts is None and self.total_tokens is None:
            raise MetricError("A request needs the tokens of its chunks, or their sum.")
        if not self.chunk_ns or (counts is not None and len(counts) != len(self.chunk_ns)):
            raise MetricError(
                f"A request needs one time and one token count a chunk and at least one chunk; it "
                f"has {len(self.chunk_ns)} times and {len(counts or ())} counts."
            )
        if counts is not None and min(counts) < 1:
            raise MetricError(f"A chunk has {min(counts)} tokens; the least is 1.")
        if None not in (counts, self.total_tokens) and sum(counts or ()) != self.total_tokens:
            raise MetricError(
                f"The chunks of a request have {sum(counts or ())} tokens and the request has "
                f"{self.total_tokens}."
            )
        times = (self.send_ns, *self.chunk_ns)
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise MetricError(
                f"Chunk times must not run backwards from t_send: {times[:4]} ... {times[-1]}."
            )


@dataclass(frozen=True)
class RequestMetrics:
    """One request by the formulas above; seconds, tokens and tokens a second.

    f is None where the tokens of single chunks are not known.
    """

    n: int
    f: int | None
    ttft_s: float
    e2e_s: float
    decode_s: float
    decode_tps: float | None
    tpot_s: float | None
    tpot_n1_s: float | None
    ntpot_s: float
    e2e_tps: float | None
    icl_s: tuple[float, ...]
    queue_s: float | None

    @property
    def tokens_per_chunk(self) -> float:
        return self.n / (len(self.icl_s) + 1)

    @property
    def decoded(self) -> int:
        """Tokens after the first chunk; 0 where that is not known."""
        return 0 if self.f is None else self.n - self.f


def request_metrics(timing: RequestTiming) -> RequestMetrics:
    if timing.chunk_tokens is None:
        assert timing.total_tokens is not None
        n, f = timing.total_tokens, None
    else:
        n, f = sum(timing.chunk_tokens), timing.chunk_tokens[0]
    decoded = 0 if f is None else n - f
    e2e_ns = timing.chunk_ns[-1] - timing.send_ns
    decode_ns = timing.chunk_ns[-1] - timing.chunk_ns[0]
    gaps = itertools.pairwise(timing.chunk_ns)
    return RequestMetrics(
        n=n,
        f=f,
        ttft_s=_seconds(timing.chunk_ns[0] - timing.send_ns),
        e2e_s=_seconds(e2e_ns),
        decode_s=_seconds(decode_ns),
        decode_tps=divide(decoded, _seconds(decode_ns)) if decoded else None,
        tpot_s=_seconds(decode_ns) / decoded if decoded else None,
        tpot_n1_s=_seconds(decode_ns) / (n - 1) if n > 1 else None,
        ntpot_s=_seconds(e2e_ns) / n,
        e2e_tps=divide(n, _seconds(e2e_ns)),
        icl_s=tuple(_seconds(later - earlier) for earlier, later in gaps),
        queue_s=(
            None if timing.intended_ns is None else _seconds(timing.send_ns - timing.intended_ns)
        ),
    )


@dataclass(frozen=True)
class GenerationRecord:
    """One measured generation of one request, as the arm that ran it saw it.

    start_ns: the request was handed to the engine. token_ns: when each token was known, in the
    order of token_ids. prefill_ns: time inside prefill steps. decode_steps: number of decode steps
    by path (`specialized`, `standard`). fallback_reasons: why the standard ones were not
    specialized. acceptance_source: who judged the drafts of the reply, if there were any; where it
    is "synthetic", the tokens are no answer of the model.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    start_ns: int
    token_ns: tuple[int, ...]
    prefill_ns: int
    decode_steps: Mapping[str, int]
    fallback_reasons: Mapping[str, int]
    acceptance_source: AcceptanceSource = "none"

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.token_ns) or not self.token_ids:
            raise MetricError(
                f"A generation needs one arrival time a token and at least one token; it has "
                f"{len(self.token_ids)} tokens and {len(self.token_ns)} times."
            )
        unknown = set(self.decode_steps) - {SPECIALIZED, STANDARD}
        if unknown:
            raise MetricError(
                f"Decode steps are counted by path {SPECIALIZED!r} or {STANDARD!r}, not by "
                f"{sorted(unknown)}."
            )

    def timing(self) -> RequestTiming:
        """Tokens with the same arrival time are one chunk."""
        chunks = Counter(self.token_ns)
        return RequestTiming(self.start_ns, tuple(chunks), tuple(chunks.values()))

    def metrics(self) -> RequestMetrics:
        return request_metrics(self.timing())


@dataclass(frozen=True)
class Spread:
    """Median and slow tail of a set of values."""

    p50: float
    p90: float
    num_values: int


@dataclass(frozen=True)
class ArmSummary:
    """The requests of one arm, run one after another. None: not defined for these requests."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    prefill_s: Spread
    prefill_tps: float | None
    ttft_s: Spread
    e2e_s: Spread
    decode_tps: float | None
    tpot_s: Spread | None
    icl_s: Spread | None
    output_tps: float | None
    decode_steps: Mapping[str, int]
    fallback_reasons: Mapping[str, int]

    @property
    def coverage(self) -> float | None:
        """None when no decode step was run."""
        return divide(self.decode_steps.get(SPECIALIZED, 0), sum(self.decode_steps.values()))

    @property
    def interactivity_p50(self) -> float | None:
        return None if self.tpot_s is None else divide(1.0, self.tpot_s.p50)

    @property
    def interactivity_slow_p90(self) -> float | None:
        return None if self.tpot_s is None else divide(1.0, self.tpot_s.p90)


def summarize(records: Sequence[GenerationRecord]) -> ArmSummary:
    """Aggregates of one arm. Raises MetricError for no records."""
    if not records:
        raise MetricError("An arm without records has no summary.")
    requests = [record.metrics() for record in records]
    decoding = [request for request in requests if request.decoded]
    prefill_s = [_seconds(record.prefill_ns) for record in records]
    prompt_tokens = sum(record.prompt_tokens for record in records)
    output_tokens = sum(request.n for request in requests)
    steps: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for record in records:
        steps.update(record.decode_steps)
        reasons.update(record.fallback_reasons)
    return ArmSummary(
        num_requests=len(records),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_s=spread(prefill_s),
        prefill_tps=divide(prompt_tokens, sum(prefill_s)),
        ttft_s=spread([request.ttft_s for request in requests]),
        e2e_s=spread([request.e2e_s for request in requests]),
        decode_tps=divide(
            sum(request.decoded for request in decoding),
            sum(request.decode_s for request in decoding),
        ),
        tpot_s=optional_spread([r.tpot_s for r in decoding if r.tpot_s is not None]),
        icl_s=optional_spread([gap for request in requests for gap in request.icl_s]),
        output_tps=divide(output_tokens, sum(request.e2e_s for request in requests)),
        decode_steps=dict(steps),
        fallback_reasons=dict(reasons),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Raises MetricError for no values, and for P99 and above of fewer than 300."""
    if not values:
        raise MetricError(f"P{percent:g} of no values is not defined.")
    if not 0 <= percent <= 100:
        raise MetricError(f"The percentile {percent:g} is outside [0, 100].")
    if percent >= 99 and len(values) < MIN_VALUES_P99:
        raise MetricError(
            f"P{percent:g} of {len(values)} values is refused; it needs {MIN_VALUES_P99}."
        )
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent, method="linear"))


def spread(values: Sequence[float]) -> Spread:
    return Spread(percentile(values, 50), percentile(values, 90), len(values))


def optional_spread(values: Sequence[float]) -> Spread | None:
    return spread(values) if values else None


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9


def divide(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
