"""An arm's requests in the forms of other tools, for whatever reads those.

Owns the translation of names. A name is filled with what its tool means by it: vLLM's TPOT is our
`tpot_n1`, its ITL our `icl`. What a form has no name for is in its native part or left out; what is
not defined is left out, and never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kdecode.bench.machine import Machine
from kdecode.bench.metrics import MIN_VALUES_P99, RequestMetrics
from kdecode.bench.serving.client import ServedRecord
from kdecode.bench.serving.facts import ServerFacts
from kdecode.bench.serving.protocol import ServedComparison
from kdecode.bench.serving.stored import counts_of
from kdecode.bench.tables import plain

LLM_D_VERSION = "0.2.1"
_QUANTILES = {"p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95}


def vllm_bench(comparison: ServedComparison, arm: int, machine: Machine) -> dict[str, Any]:
    """The keys of `vllm bench serve --save-result --save-detailed`."""
    records = _records(comparison, arm)
    done = [(record, metrics) for record in records if (metrics := record.metrics()) is not None]
    seconds, summary = _seconds(comparison, arm), comparison.summaries[arm]
    load, counts = comparison.design.load, comparison.summaries[arm].counts
    document: dict[str, Any] = {
        "date": machine.date,
        "endpoint_type": "openai",
        "backend": "kdecode",
        "model_id": comparison.facts[arm].model,
        "num_prompts": summary.planned,
        "request_rate": "inf" if load.rate is None else load.rate,
        "max_concurrency": load.concurrency,
        "duration": seconds,
        "completed": summary.completed,
        "failed": summary.planned - summary.completed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.completed / seconds,
        "output_throughput": summary.output_tps,
        "total_token_throughput": _per_second(
            summary.prompt_tokens, summary.output_tokens, seconds
        ),
        "input_lens": [record.reply.prompt_tokens for record, _ in done if record.reply],
        "output_lens": [metrics.n for _, metrics in done],
        "ttfts": [metrics.ttft_s for _, metrics in done],
        "itls": [list(metrics.icl_s) for _, metrics in done],
        "latencies": [metrics.e2e_s for _, metrics in done],
        "start_times": [record.send_ns / 1e9 for record, _ in done],
        "errors": [record.error or "" for record in records],
        "spec_decode_acceptance_rate": _percent(counts.acceptance_rate),
        "spec_decode_acceptance_length": counts.acceptance_length,
        "spec_decode_num_drafts": counts.rounds,
        "spec_decode_draft_tokens": counts.drafted,
        "spec_decode_accepted_tokens": counts.accepted,
    }
    metrics = [one for _, one in done]
    for name, values in (
        ("ttft", [one.ttft_s for one in metrics]),
        ("tpot", [one.tpot_n1_s for one in metrics if one.tpot_n1_s is not None]),
        ("itl", [gap for one in metrics for gap in one.icl_s]),
        ("e2el", [one.e2e_s for one in metrics]),
    ):
        document |= _milliseconds(name, values)
    return {name: value for name, value in document.items() if value is not None}


def aiperf_records(comparison: ServedComparison, arm: int) -> Iterator[dict[str, Any]]:
    """A line each of AIPerf's record export; its inter-token latency is our `tpot`."""
    for record in _records(comparison, arm):
        metrics = record.metrics()
        yield {
            "metadata": {
                "x_request_id": record.request_id,
                "conversation_id": record.session or record.request_id,
                "turn_index": record.turn,
                "request_start_ns": record.send_ns,
                "request_end_ns": record.end_ns,
                "benchmark_phase": "profiling",
                "was_cancelled": False,
            },
            "metrics": {} if metrics is None else _aiperf(record, metrics),
            "error": None if record.error is None else {"message": record.error},
        }


def llm_d_report(comparison: ServedComparison, arm: int, machine: Machine) -> dict[str, Any]:
    """llm-d's benchmark report, schema 0.2.1. Speculation, coverage and decode-only rates have no
    place in it, and are in the load's native part."""
    facts, summary = comparison.facts[arm], comparison.summaries[arm]
    metrics = [m for record in _records(comparison, arm) if (m := record.metrics()) is not None]
    prompts = [r.reply.prompt_tokens for r in _records(comparison, arm) if r.reply is not None]
    known = [float(length) for length in prompts if length is not None]
    load, workload = comparison.design.load, comparison.workload
    return {
        "version": LLM_D_VERSION,
        "run": {
            "uid": f"{comparison.comparison_id}-{arm}",
            "eid": comparison.comparison_id,
            "time": {"end": machine.date, "duration": f"PT{_seconds(comparison, arm):.6f}S"},
        },
        "scenario": {
            "stack": [
                {
                    "metadata": {
                        "label": comparison.arm_names[arm],
                        "cfg_id": str(facts.recorded.get("digest") or comparison.urls[arm]),
                    },
                    "standardized": _component(facts),
                    "native": {"config": plain(facts.config)},
                }
            ],
            "load": {
                "metadata": {"cfg_id": workload.digest, "description": workload.name},
                "standardized": {
                    "tool": "kdecode compare",
                    "tool_version": str(machine.versions.get("kdecode")),
                    "source": "random",
                    "input_seq_len": _lengths(known),
                    "output_seq_len": _lengths([float(m.n) for m in metrics]),
                    "rate_qps": load.rate,
                    "concurrency": load.concurrency,
                },
                "native": {"config": _native(comparison, arm)},
            },
        },
        "results": {
            "request_performance": {
                "aggregate": {
                    "requests": {
                        "total": summary.sent,
                        "failures": summary.sent - summary.completed,
                        "input_length": _statistics(known, "count"),
                        "output_length": _statistics([float(m.n) for m in metrics], "count"),
                    },
                    "latency": _latencies(metrics),
                    "throughput": {
                        "output_token_rate": _mean(summary.output_tps, "tokens/s"),
                        "request_rate": _mean(
                            summary.completed / _seconds(comparison, arm), "queries/s"
                        ),
                    },
                }
            }
        },
    }


def _component(facts: ServerFacts) -> dict[str, Any]:
    """An engine needs its devices and what they share out; of others, the tool alone is told."""
    named = {"tool": facts.kind, "tool_version": _version(facts.config)}
    hardware, parallelism = facts.config.get("hardware.name"), _parallelism(facts.config)
    if facts.accelerators is None or hardware is None or parallelism is None:
        return {"kind": "generic", **named, "model": {"name": facts.model}}
    return {
        "kind": "inference_engine",
        **named,
        # Prefill and decode in one.
        "role": "replica",
        "replicas": 1,
        "model": {"name": facts.model},
        "accelerator": {
            "model": hardware,
            "count": facts.accelerators,
            "parallelism": parallelism,
        },
    }


def _parallelism(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Tensor, pipeline and data parallelism; None where the server does not tell the first."""
    found = {}
    for short, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        ours, vllms = f"{name}_parallel_size", f"parallel_config.{name}_parallel_size"
        size = config.get(ours, config.get(vllms))
        if isinstance(size, int):
            found[short] = size
    return found if "tp" in found else None


def _native(comparison: ServedComparison, arm: int) -> dict[str, Any]:
    summary = comparison.summaries[arm]
    return {
        "design": plain(comparison.design),
        "kind": comparison.facts[arm].study,
        "outputs_valid": comparison.outputs_valid,
        "decode_tps": summary.decode_tps,
        "decode_tps_steady": summary.decode_tps_steady,
        "counts": counts_of(summary.counts),
    }


def _latencies(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    def of(read: Callable[[RequestMetrics], float | None], units: str) -> dict[str, Any] | None:
        return _statistics([v for m in metrics if (v := read(m)) is not None], units)

    return {
        "time_to_first_token": of(lambda m: m.ttft_s, "s"),
        "normalized_time_per_output_token": of(lambda m: m.ntpot_s, "s/token"),
        # The schema's own note has this formula for it.
        "time_per_output_token": of(lambda m: m.tpot_n1_s, "s/token"),
        "inter_token_latency": of(lambda m: m.tpot_s, "s/token"),
        "request_latency": of(lambda m: m.e2e_s, "s"),
    }


def _aiperf(record: ServedRecord, metrics: RequestMetrics) -> dict[str, Any]:
    def value(number: Any, unit: str) -> dict[str, Any]:
        return {"value": number, "unit": unit}

    found = {
        "time_to_first_token": value(1e3 * metrics.ttft_s, "ms"),
        "request_latency": value(1e3 * metrics.e2e_s, "ms"),
        "inter_chunk_latency": value([1e3 * gap for gap in metrics.icl_s], "ms"),
        "output_sequence_length": value(metrics.n, "tokens"),
    }
    if metrics.tpot_s is not None and metrics.decode_tps is not None:
        found["inter_token_latency"] = value(1e3 * metrics.tpot_s, "ms")
        found["output_token_throughput_per_user"] = value(metrics.decode_tps, "tokens/sec/user")
    if record.reply is not None and record.reply.prompt_tokens is not None:
        found["input_sequence_length"] = value(record.reply.prompt_tokens, "tokens")
    return found


def _records(comparison: ServedComparison, arm: int) -> list[ServedRecord]:
    return [record for one in comparison.passes if one.arm == arm for record in one.result.records]


def _seconds(comparison: ServedComparison, arm: int) -> float:
    passes = [one.result for one in comparison.passes if one.arm == arm]
    return sum(one.end_ns - one.begin_ns for one in passes) / 1e9


def _per_second(prompt: int | None, output: int, seconds: float) -> float | None:
    return None if prompt is None else (prompt + output) / seconds


def _milliseconds(name: str, values: Sequence[float]) -> dict[str, float]:
    """vLLM's four numbers of a quantity; its P99 only where there are enough values."""
    if not values:
        return {}
    scaled = 1e3 * np.asarray(values)
    found = {
        f"mean_{name}_ms": float(scaled.mean()),
        f"median_{name}_ms": float(np.median(scaled)),
        f"std_{name}_ms": float(scaled.std()),
    }
    if len(values) >= MIN_VALUES_P99:
        found[f"p99_{name}_ms"] = float(np.percentile(scaled, 99))
    return found


def _statistics(values: Sequence[float], units: str) -> dict[str, Any] | None:
    if not values:
        return None
    array = np.asarray(values)
    found: dict[str, Any] = {"units": units, "mean": float(array.mean())}
    found |= {"stddev": float(array.std()), "min": float(array.min()), "max": float(array.max())}
    found |= {name: float(np.percentile(array, q)) for name, q in _QUANTILES.items()}
    if len(values) >= MIN_VALUES_P99:
        found["p99"] = float(np.percentile(array, 99))
    return found


def _mean(value: float | None, units: str) -> dict[str, Any] | None:
    return None if value is None else {"units": units, "mean": value}


def _lengths(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    if min(values) == max(values):
        return {"distribution": "fixed", "value": values[0]}
    return {
        "distribution": "other",
        "value": float(np.mean(values)),
        "min": int(min(values)),
        "max": int(max(values)),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _version(config: Any) -> str:
    names = ("versions.kdecode", "versions.vllm", "version")
    return next((str(config[name]) for name in names if config.get(name)), "not told")
