"""Metrics of several replicas as one document that Prometheus reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kdecode.replicas.exposition import merged


def _text(engine: str, amount: int) -> str:
    registry = CollectorRegistry()
    counter = Counter("tokens", "Tokens", ("engine",), registry=registry)
    counter.labels(engine).inc(amount)
    times = Histogram("seconds", "Times", ("engine",), registry=registry, buckets=(1.0, 2.0))
    times.labels(engine).observe(amount)
    return generate_latest(registry).decode()


def test_every_metric_is_there_once_with_all_samples() -> None:
    families = {
        f.name: f for f in text_string_to_metric_families(merged([_text("0", 1), _text("1", 5)]))
    }
    samples = {
        (s.name, s.labels["engine"]): s.value
        for s in families["tokens"].samples
        if s.name == "tokens_total"
    }
    assert samples == {("tokens_total", "0"): 1, ("tokens_total", "1"): 5}
    assert families["seconds"].type == "histogram"
    assert {s.labels["engine"] for s in families["seconds"].samples} == {"0", "1"}


def test_one_is_as_it_was_and_none_is_empty() -> None:
    text = _text("0", 1)
    assert merged([text]) == text
    assert merged([]) == ""
