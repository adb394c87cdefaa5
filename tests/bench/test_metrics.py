"""The definitions, on the worked example and at their edges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdecode.bench.metrics import (
    FORMULAS,
    SERVED_FORMULAS,
    GenerationRecord,
    MetricError,
    RequestTiming,
    percentile,
    request_metrics,
    summarize,
)

MS = 1_000_000
# Ten chunks of 4 tokens, the first at 200 ms, then every 10 ms.
WORKED = RequestTiming(
    send_ns=7 * MS,
    chunk_ns=tuple((207 + 10 * i) * MS for i in range(10)),
    chunk_tokens=(4,) * 10,
    intended_ns=4 * MS,
)


def test_worked_example_to_the_digit() -> None:
    m = request_metrics(WORKED)
    assert (m.n, m.f) == (40, 4)
    assert m.ttft_s == 0.2
    assert m.e2e_s == 0.29
    assert m.decode_s == 0.09
    assert m.decode_tps == pytest.approx(400, rel=1e-12)
    assert m.tpot_s == pytest.approx(2.5e-3, rel=1e-12)
    assert m.tpot_n1_s is not None
    assert f"{1e3 * m.tpot_n1_s:.2f}" == "2.31"
    assert m.ntpot_s == pytest.approx(7.25e-3, rel=1e-12)
    assert m.e2e_tps is not None
    assert f"{m.e2e_tps:.1f}" == "137.9"
    assert m.icl_s == (0.01,) * 9
    assert m.tokens_per_chunk == 4
    assert m.queue_s == 0.003


def test_one_chunk_has_no_decode_rate() -> None:
    m = request_metrics(RequestTiming(0, (200 * MS,), (4,)))
    assert (m.decode_tps, m.tpot_s) == (None, None)
    assert m.tpot_n1_s == 0.0
    assert m.icl_s == ()
    assert m.queue_s is None
    assert request_metrics(RequestTiming(0, (200 * MS,), (1,))).tpot_n1_s is None


def test_no_time_between_chunks_is_undefined_not_infinite() -> None:
    assert request_metrics(RequestTiming(0, (5, 5), (1, 1))).decode_tps is None


@pytest.mark.parametrize(
    ("times", "counts", "message"),
    [
        ((), (), "at least one chunk"),
        ((1, 2), (1,), "2 times and 1 counts"),
        ((1, 2), (1, 0), "0 tokens"),
        ((2, 1), (1, 1), "backwards"),
        ((-1,), (1,), "backwards"),
    ],
)
def test_bad_timings_are_refused(
    times: tuple[int, ...], counts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(MetricError, match=message):
        RequestTiming(0, times, counts)


def record(token_ns: tuple[int, ...], prefill_ns: int = 100 * MS, **steps: int) -> GenerationRecord:
    return GenerationRecord(
        prompt_tokens=50,
        token_ids=tuple(range(len(token_ns))),
        start_ns=0,
        token_ns=token_ns,
        prefill_ns=prefill_ns,
        decode_steps=steps,
        fallback_reasons={"mixed": steps["standard"]} if steps.get("standard") else {},
    )


def test_tokens_that_arrive_together_are_one_chunk() -> None:
    timing = record((5, 5, 5, 9, 9)).timing()
    assert (timing.chunk_ns, timing.chunk_tokens) == ((5, 9), (3, 2))


def test_decode_rate_leaves_prefill_out() -> None:
    # 900 ms of prefill, then 10 more tokens in 100 ms.
    run = record(tuple((900 + 10 * i) * MS for i in range(11)), prefill_ns=900 * MS)
    summary = summarize([run, run])
    assert summary.decode_tps == pytest.approx(100)
    assert summary.output_tps == pytest.approx(11)
    assert summary.prefill_tps == pytest.approx(50 / 0.9)
    assert summary.interactivity_slow_p90 == pytest.approx(100)


def test_summary_of_an_arm() -> None:
    runs = [
        record((100 * MS, 110 * MS, 120 * MS), specialized=2),
        record((300 * MS, 340 * MS, 380 * MS), standard=2),
        record((500 * MS,)),
    ]
    summary = summarize(runs)
    assert (summary.num_requests, summary.prompt_tokens, summary.output_tokens) == (3, 150, 7)
    assert summary.ttft_s.p50 == 0.3
    assert summary.ttft_s.p90 == pytest.approx(0.46)
    assert summary.tpot_s is not None
    assert summary.tpot_s.p50 == pytest.approx(0.025)
    assert summary.tpot_s.num_values == 2
    assert summary.decode_tps == pytest.approx(4 / 0.1)
    assert summary.output_tps == pytest.approx(7 / (0.12 + 0.38 + 0.5))
    assert summary.coverage == 0.5
    assert summary.fallback_reasons == {"mixed": 2}


def test_undefined_stays_undefined() -> None:
    summary = summarize([record((500 * MS,), prefill_ns=0)])
    assert summary.decode_tps is None
    assert summary.tpot_s is None
    assert summary.icl_s is None
    assert summary.prefill_tps is None
    assert summary.coverage is None
    assert summary.interactivity_p50 is None
    assert summary.interactivity_slow_p90 is None
    with pytest.raises(MetricError, match="without records"):
        summarize([])


def test_bad_records_are_refused() -> None:
    with pytest.raises(MetricError, match="at least one token"):
        record(())
    with pytest.raises(MetricError, match="'stock'"):
        record((1,), stock=1)


def test_percentiles() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 90) == pytest.approx(3.7)
    assert percentile(list(range(300)), 99) == pytest.approx(296.01)
    with pytest.raises(MetricError, match="299 values is refused; it needs 300"):
        percentile([1.0] * 299, 99)
    with pytest.raises(MetricError, match="no values"):
        percentile([], 50)
    with pytest.raises(MetricError, match="outside"):
        percentile([1.0], 101)


def test_documentation_states_every_formula() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, flags=re.MULTILINE))
    formulas = {**FORMULAS, **SERVED_FORMULAS}
    assert {name: rows.get(name) for name in formulas} == formulas
