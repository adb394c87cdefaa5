"""Prometheus metrics: vLLM's names where the meaning is the same, our own under `kdecode:`.

Owns names, labels and buckets. Per-token times start at 50 microseconds, because a decode step of
the specialised path takes less than one of vLLM's smallest default buckets. Times of requests are
the engine's own clock: `start` is when a request was handed to it, not when a client sent it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from kdecode.engine.engine import LLM
from kdecode.engine.loop import Event, StepRecord

TOKEN_SECONDS = (
    *(0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005),
    *(0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
PHASE_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
TOKEN_COUNTS = tuple(float(2**power) for power in range(21))
_LABELS = ("model_name", "engine")


class Metrics:
    """All metrics of one served model, in a registry of its own. engine: its label in them."""

    def __init__(self, llm: LLM, model_name: str, engine: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, engine)
        self.registry.register(_EngineState(llm, self._labels))
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that began"
        )
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by how",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        seconds = TOKEN_SECONDS
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two steps that gave a request tokens",
            seconds,
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after a request's first",
            seconds,
        )
        phases = {
            "time_to_first_token": "From hand-over to the first token",
            "e2e_request_latency": "From hand-over to the last token",
            "request_queue_time": "From hand-over to the first step",
            "request_prefill_time": "From the first step to the first token",
            "request_decode_time": "From the first token to the last",
            "request_inference_time": "From the first step to the last token",
        }
        self._phases = {
            name: self._histogram(f"vllm:{name}_seconds", text, PHASE_SECONDS)
            for name, text in phases.items()
        }
        self._prompt_sizes = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", TOKEN_COUNTS
        )
        self._reply_sizes = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request", TOKEN_COUNTS
        )
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens of an engine step", TOKEN_COUNTS
        )
        self._step_time = Histogram(
            "kdecode:step_time_seconds",
            "Time of an engine step, by what it had and which path served it",
            (*_LABELS, "kind", "path"),
            buckets=seconds,
            registry=self.registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def on_step(self, step: StepRecord) -> None:
        """Called from the engine's thread."""
        kind = "decode" if step.has_decode else "prefill"
        self._step_tokens.observe(step.num_tokens)
        labels = (*self._labels, kind, step.path[0])
        self._step_time.labels(*labels).observe(step.duration_ns / 1e9)

    def follow(self, prompt_tokens: int, start_ns: int) -> RequestWatch:
        """Watches a request that was handed to the engine at start_ns, by its clock."""
        return RequestWatch(self, prompt_tokens, start_ns)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)
        return metric.labels(*self._labels)


class RequestWatch:
    """Counts one request's events, as they come."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, start_ns: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._num_tokens = 0
        self._start_ns = start_ns
        self._first_step_ns = self._first_ns = self._last_ns = 0
        self._is_over = False

    def on_event(self, event: Event) -> None:
        if event.token_id is None:
            return
        metrics = self._metrics
        metrics._generated.inc()
        self._num_tokens += 1
        if self._num_tokens == 1:
            metrics._prompt_tokens.inc(self._prompt_tokens)
            self._first_ns = event.time_ns
            self._first_step_ns = event.first_step_ns or event.time_ns
            self._observe("time_to_first_token", event.time_ns - self._start_ns)
        elif event.time_ns > self._last_ns:
            # Tokens of one step arrive together, and are one event.
            metrics._inter_token.observe((event.time_ns - self._last_ns) / 1e9)
        self._last_ns = event.time_ns

    def finish(self, reason: str) -> None:
        """The request ended, or was given up; only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        metrics = self._metrics
        metrics._success.labels(*metrics._labels, reason).inc()
        if not self._num_tokens:
            return
        self._observe("e2e_request_latency", self._last_ns - self._start_ns)
        self._observe("request_queue_time", self._first_step_ns - self._start_ns)
        self._observe("request_prefill_time", self._first_ns - self._first_step_ns)
        self._observe("request_decode_time", self._last_ns - self._first_ns)
        self._observe("request_inference_time", self._last_ns - self._first_step_ns)
        metrics._prompt_sizes.observe(self._prompt_tokens)
        metrics._reply_sizes.observe(self._num_tokens)
        if self._num_tokens > 1:
            decode_s = (self._last_ns - self._first_ns) / 1e9
            metrics._per_token.observe(decode_s / (self._num_tokens - 1))

    def _observe(self, phase: str, duration_ns: int) -> None:
        self._metrics._phases[phase].observe(duration_ns / 1e9)


class _EngineState(Collector):
    """What the engine knows at the time it is asked."""

    def __init__(self, llm: LLM, labels: tuple[str, str]) -> None:
        self._llm = llm
        self._labels = labels
        resolved = llm.resolved_config()
        self._cache = resolved["cache"]
        self._is_valid = resolved["outputs_valid"]
        self._num_ranks = resolved["tensor_parallel_size"]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily]:
        stats, cache = self._llm.stats(), self._cache
        gauges = {
            "vllm:num_requests_running": ("Requests in the engine's steps", stats["running"]),
            "vllm:num_requests_waiting": ("Requests that wait for a slot", stats["waiting"]),
            "vllm:kv_cache_usage_perc": (
                "Used share of the MLA pages, from 0 to 1",
                stats["pages_used"] / cache["pages"],
            ),
            "kdecode:state_slot_usage": (
                "Used share of the KDA slots, from 0 to 1",
                stats["slots_used"] / cache["slots"],
            ),
            "kdecode:coverage": (
                "Share of decode steps that the specialised path served; absent before the first",
                stats["coverage"],
            ),
            "kdecode:tensor_parallel_size": ("Processes that share the model", self._num_ranks),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            if value is not None:
                gauge.add_metric(self._labels, value)
                yield gauge
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preemptions", labels=_LABELS)
        preempted.add_metric(self._labels, stats["preemptions"])
        yield preempted
        steps = CounterMetricFamily(
            "kdecode:decode_steps",
            "Decode steps by path, and why it was not the specialised one",
            labels=(*_LABELS, "path", "reason"),
        )
        for row in stats["decode_steps"]:
            steps.add_metric((*self._labels, row["path"], row["reason"]), row["steps"])
        yield steps
        prefill = CounterMetricFamily("kdecode:prefill_steps", "Prefill steps", labels=_LABELS)
        prefill.add_metric(self._labels, stats["prefill_steps"])
        yield prefill
        if stats["speculation"] is not None:
            yield from self._rounds(stats["speculation"])
        if stats["prefix_cache"] is not None:
            yield from self._prefixes(stats["prefix_cache"])
        info = InfoMetricFamily("vllm:cache_config", "The caches as resolved", labels=_LABELS)
        settings = {"block_size": cache["page_tokens"], "num_gpu_blocks": cache["pages"]}
        settings |= {"cache_dtype": cache["dtype"], "state_slots": cache["slots"]}
        info.add_metric(self._labels, {name: str(value) for name, value in settings.items()})
        yield info

    def _prefixes(self, found: dict[str, Any]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The prefix cache; only there with one."""
        counts = {
            "vllm:prefix_cache_queries": ("Tokens of requests that may hit", found["queries"]),
            "vllm:prefix_cache_hits": ("Tokens taken over from the caches", found["hits"]),
            "kdecode:prefix_cache_lost_to_state": (
                "Tokens whose pages were there and whose KDA state was not",
                found["lost_to_state"],
            ),
            "kdecode:prefix_cache_page_evictions": (
                "Pages of prefixes given to others",
                found["page_evictions"],
            ),
            "kdecode:prefix_cache_state_evictions": (
                "KDA states replaced by others",
                found["state_evictions"],
            ),
        }
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        gauges = {
            "kdecode:prefix_cache_min_tokens": ("The shortest reusable prefix", "min_tokens"),
            "kdecode:prefix_cache_can_hit": ("0 where no prompt is long enough", "can_hit"),
            "kdecode:prefix_cache_pages": ("Pages of known content", "pages"),
            "kdecode:prefix_cache_states": ("KDA states kept", "states"),
            "kdecode:prefix_cache_state_places": ("KDA states there is room for", "state_places"),
        }
        for name, (text, key) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, float(found[key]))
            yield gauge

    def _rounds(self, found: dict[str, Any]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Speculative decoding; a draft of vLLM's is a round with drafts of ours."""
        counts = {
            "vllm:spec_decode_num_drafts": ("Rounds with drafts", found["rounds"]),
            "vllm:spec_decode_num_draft_tokens": ("Drafted tokens", found["drafted_tokens"]),
            "vllm:spec_decode_num_accepted_tokens": ("Accepted drafts", found["accepted_tokens"]),
            "kdecode:spec_decode_num_emitted_tokens": (
                "Tokens of rounds that reached their requests",
                found["emitted_tokens"],
            ),
            "kdecode:spec_decode_steps": ("Decode steps with drafts", found["steps"]),
        }
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in the round",
            labels=(*_LABELS, "position"),
        )
        for place, value in enumerate(found["accepted_by_place"]):
            places.add_metric((*self._labels, str(place)), value)
        yield places
        seconds = CounterMetricFamily(
            "kdecode:spec_decode_seconds",
            "Time of steps with drafts: proposing, the target's step and verdicts, caches moved",
            labels=(*_LABELS, "phase"),
        )
        for phase in ("draft", "verify", "commit"):
            seconds.add_metric((*self._labels, phase), found[f"{phase}_ns"] / 1e9)
        yield seconds
        valid = GaugeMetricFamily(
            "kdecode:outputs_valid",
            "0 where drafts are accepted at stated rates: replies are no answers of the model",
            labels=_LABELS,
        )
        valid.add_metric(self._labels, float(self._is_valid))
        yield valid
