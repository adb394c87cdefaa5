"""What a comparison of servers is written as: pages, files, forms of other tools."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from mock_server import CONFIG, MockServer
from simulated import simulate

from kdecode.bench.machine import Machine
from kdecode.bench.metrics import RequestTiming
from kdecode.bench.serving import charts, report
from kdecode.bench.serving.client import Client, ServedRecord
from kdecode.bench.serving.counters import add_up
from kdecode.bench.serving.design import Design, MeasuredPass
from kdecode.bench.serving.exports import aiperf_records, llm_d_report, vllm_bench
from kdecode.bench.serving.folder import render_markdown, write_folder
from kdecode.bench.serving.http import Target
from kdecode.bench.serving.load import Load, PassResult
from kdecode.bench.serving.protocol import ServedComparison, compare_servers
from kdecode.bench.serving.reply import Reply
from kdecode.bench.serving.report_html import render_html
from kdecode.bench.serving.summary import Limits, summarize_passes
from kdecode.bench.workloads.types import Request, Workload

MACHINE = Machine("test <cpu>", 2, (), "Test 1", "2025-01-01T00:00:00+00:00", {"kdecode": "0"}, 1)
WORKLOAD = Workload(
    "two lengths",
    (
        Request("r0", 40, prompt_ids=tuple(range(9)), session="s"),
        Request("r1", 40, prompt_ids=tuple(range(30)), session="s", turn=1),
    ),
)


def measured(folder: Path, **changes: Any) -> ServedComparison:
    speculative = {"method": "dspark", "synthetic_acceptance_rates": None}
    config = {**CONFIG, "speculative": speculative}
    a = MockServer("a", config=config, tokens_per_chunk=4, acceptance=3.0, coverage=0.0)
    fast = {**config, "decode_backend": "latency_specialized"}
    fields = {"config": fast, "chunk_ms": 8.0, "coverage": 1.0, **changes}
    b = MockServer("b", tokens_per_chunk=4, acceptance=3.0, **fields)

    async def main() -> ServedComparison:
        async with a.running() as url_a, b.running() as url_b:
            clients = [Client(n, Target.from_url(u)) for n, u in (("a", url_a), ("b", url_b))]
            design = Design(Load(concurrency=1), blocks=2, has_null=False)
            return await compare_servers(clients[0], clients[1], WORKLOAD, design)

    found: ServedComparison = simulate(folder, main())
    return found


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> ServedComparison:
    return measured(tmp_path_factory.mktemp("sockets"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ServedComparison:
    return measured(tmp_path_factory.mktemp("sockets"), config=CONFIG)


class _Page(HTMLParser):
    """Open elements, and everything that would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


VLLM_BENCH = json.loads((Path(__file__).parent / "vllm_bench_result.json").read_text())


def of_vllms_own_client(found: dict[str, Any]) -> PassResult:
    """The requests of a result file of `vllm bench serve`, as if this client had measured them."""
    records = []
    begin = min(found["start_times"])
    for number, start in enumerate(found["start_times"]):
        prompt, n = found["input_lens"][number], found["output_lens"][number]
        send = round((start - begin) * 1e9)
        gaps = [found["ttfts"][number], *found["itls"][number]]
        times = tuple(send + round(sum(gaps[: i + 1]) * 1e9) for i in range(len(gaps)))
        timing = RequestTiming(send, times, (1,) * n)
        reply = Reply(
            times, (1,) * n, "usage per chunk", None, "", "", "", "length", prompt, n, 0, None, True
        )
        records.append(ServedRecord(f"r{number}", "", 0, send, times[-1], timing, reply, None))
    return PassResult(tuple(records), len(records), 0, round(found["duration"] * 1e9), ())


def test_the_export_says_what_vllms_own_client_says_of_its_times(faster: ServedComparison) -> None:
    """A real result file of vLLM 0.32: its times in, its figures out."""
    one = of_vllms_own_client(VLLM_BENCH)
    summary = summarize_passes([one], add_up([]), Limits(), 1)
    comparison = dataclasses.replace(
        faster, passes=(MeasuredPass(0, 0, 0, one),), summaries=(summary, faster.summaries[1])
    )
    found = vllm_bench(comparison, 0, MACHINE)
    shared = {name for name, value in found.items() if name in VLLM_BENCH and value is not None}
    figures = {name for name in shared if isinstance(VLLM_BENCH[name], int | float | list)}
    assert len(figures) >= 25
    for name in figures - {"start_times", "errors"}:
        ours, theirs = (np.hstack([value[name]]).ravel() for value in (found, VLLM_BENCH))
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9), name
    # The same replies under our names: TPOT is tpot_n1, ITL is icl; with a token a chunk, tpot is
    # the first of them, too.
    assert summary.icl_s is not None
    assert 1e3 * summary.icl_s.p50 == pytest.approx(VLLM_BENCH["median_itl_ms"], rel=1e-6)
    metrics = [m for record in one.records if (m := record.metrics()) is not None]
    assert [m.tpot_s for m in metrics] == [m.tpot_n1_s for m in metrics]
    # What is decode throughput alone stands nowhere in the file.
    assert summary.decode_tps == pytest.approx(
        sum(VLLM_BENCH["output_lens"]) / 24 * 23 / sum(map(sum, VLLM_BENCH["itls"])), rel=1e-6
    )


def test_the_page_is_whole_and_loads_nothing(faster: ServedComparison) -> None:
    text = render_html(faster, MACHINE)
    page = _Page()
    page.feed(text)
    assert (page.open, page.loaded) == ([], [])
    assert not re.search(r"https?://(?!a:1|b:1)|@import|url\(", text)
    assert 'name="viewport" content="width=device-width' in text
    assert "test &lt;cpu&gt;" in text
    for heading in (
        "b against a: faster",
        "Ratios",
        "Time per token",
        "Time to first token",
        "Request latency",
        "Tokens a second: for one user, and of all",
        "Time per token by context",
        "The blocks, in their order",
        "Drafts accepted, by their place",
        "Decode steps, by what served them",
        "How the numbers were obtained",
    ):
        assert heading in text


def test_kinds_of_results_are_never_joined(mixed: ServedComparison) -> None:
    assert [table.arms for table in report.tables(mixed)] == [("a",), ("b",)]
    text = render_html(mixed, MACHINE)
    assert "<svg" not in text
    assert text.count("<table class=arms>") == 2


def test_every_finding_is_in_every_form(faster: ServedComparison) -> None:
    terminal = report.render(faster, MACHINE)
    markdown, page = render_markdown(faster, MACHINE), render_html(faster, MACHINE)
    (table,) = report.tables(faster)
    for row in table.rows:
        for cell in row:
            assert cell in terminal
            assert cell in markdown
            assert escape(cell) in page
    assert "verdict: faster (exit code 0)" in terminal
    assert "verdict: faster (exit code 0)" in markdown


def test_a_folder_of_files(faster: ServedComparison, tmp_path: Path) -> None:
    written = {str(path.relative_to(tmp_path)) for path in write_folder(tmp_path, faster, MACHINE)}
    assert written == {
        *("report.md", "report.html", "comparison.json", "requests.jsonl"),
        *(f"exports/vllm-bench-{arm}.json" for arm in "ab"),
        *(f"exports/aiperf-{arm}.jsonl" for arm in "ab"),
        *(f"exports/llm-d-{arm}.json" for arm in "ab"),
    }
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 2 * 2
    assert lines[0]["timing"]["chunk_tokens"] == [4] * 10
    assert {line["comparison_id"] for line in lines} == {faster.comparison_id}
    assert "t0 t1" not in (tmp_path / "requests.jsonl").read_text()


def test_names_of_vllm_mean_what_they_mean_there(faster: ServedComparison) -> None:
    """The worked example, as vLLM would print it."""
    found = vllm_bench(faster, 0, MACHINE)
    assert f"{found['mean_tpot_ms']:.2f}" == "2.31"
    assert found["mean_itl_ms"] == pytest.approx(10)
    assert found["itls"][0] == [0.01] * 9
    assert (found["ttfts"][0], found["latencies"][0]) == (0.2, 0.29)
    assert (found["input_lens"], found["output_lens"][0]) == ([9, 30] * 4, 40)
    assert "p99_ttft_ms" not in found
    assert found["spec_decode_acceptance_length"] == 3
    assert found["spec_decode_acceptance_rate"] == pytest.approx(100 * 2 / 7)


def test_names_of_aiperf_mean_what_they_mean_there(faster: ServedComparison) -> None:
    first, second = list(aiperf_records(faster, 0))[:2]
    assert first["metrics"]["inter_token_latency"]["value"] == pytest.approx(2.5)
    assert first["metrics"]["output_token_throughput_per_user"]["value"] == pytest.approx(400)
    assert first["metrics"]["inter_chunk_latency"]["value"] == pytest.approx([10] * 9)
    assert second["metadata"]["conversation_id"] == "s"
    assert second["metadata"]["turn_index"] == 1
    assert second["metadata"]["request_start_ns"] > first["metadata"]["request_start_ns"]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}")
    else:
        yield path, value


def test_llm_d_has_no_borrowed_names(faster: ServedComparison) -> None:
    found = llm_d_report(faster, 1, MACHINE)
    aggregate = found["results"]["request_performance"]["aggregate"]
    assert aggregate["requests"]["total"] == 8
    assert aggregate["latency"]["inter_token_latency"]["mean"] == pytest.approx(2e-3)
    assert aggregate["latency"]["inter_token_latency"]["units"] == "s/token"
    assert found["scenario"]["load"]["metadata"]["cfg_id"] == WORKLOAD.digest
    assert found["scenario"]["load"]["standardized"]["output_seq_len"] == {
        "distribution": "fixed",
        "value": 40,
    }
    # An engine of this schema has to tell how it shares its devices out; this server does not.
    assert found["scenario"]["stack"][0]["standardized"]["kind"] == "generic"
    ours = [path for path, _ in leaves(found) if "acceptance" in path or "coverage" in path]
    assert ours
    assert all(".native." in path for path in ours)


LLM_D_SCHEMA = json.loads((Path(__file__).parent / "llm_d_report_schema.json").read_text())


@pytest.mark.parametrize("parallel", [None, 4])
def test_llm_d_reads_its_report(tmp_path: Path, parallel: int | None) -> None:
    """By its own schema, which forbids what it does not name."""
    told = {} if parallel is None else {"tensor_parallel_size": parallel}
    lossy = measured(tmp_path, fail_every=5, config={**CONFIG, **told})
    for arm in (0, 1):
        document = json.loads(json.dumps(llm_d_report(lossy, arm, MACHINE)))
        jsonschema.validate(document, LLM_D_SCHEMA)
    (component,) = document["scenario"]["stack"]
    if parallel is None:
        assert component["standardized"]["kind"] == "generic"
    else:
        devices = component["standardized"]["accelerator"]
        assert (devices["count"], devices["parallelism"]) == (8, {"tp": 4})
    lines = report.header_lines(lossy, MACHINE)
    has_ranks = [line.endswith(" x test accelerator, tensor parallel 4") for line in lines[1:3]]
    assert has_ranks == [False, parallel == 4]
    document["results"]["request_performance"]["aggregate"]["speed"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, LLM_D_SCHEMA)


def test_failed_requests_are_in_every_form(tmp_path: Path) -> None:
    lossy = measured(tmp_path, fail_every=5)
    found = vllm_bench(lossy, 1, MACHINE)
    assert (found["completed"], found["failed"]) == (7, 1)
    assert sum("status 500" in error for error in found["errors"]) == 1
    errors = [record["error"] for record in aiperf_records(lossy, 1)]
    assert sum(error is not None for error in errors) == 1
    assert (
        "failures"
        in llm_d_report(lossy, 1, MACHINE)["results"]["request_performance"]["aggregate"][
            "requests"
        ]
    )
    assert write_folder(tmp_path / "out", lossy, MACHINE)


def test_axes_have_round_ticks_and_hold_every_point() -> None:
    text = charts.plot([charts.Series("a", [(0.013, 7.0), (0.087, 93.0)])], "x", "y")
    assert text is not None
    for tick in (0, 0.02, 0.04, 0.06, 0.08, 0.1, 20, 100):
        assert f">{tick}</text>" in text
    places = [float(p) for p in re.findall(r"[ML](\d+\.\d) ", text)]
    assert all(0 <= place <= charts.WIDTH for place in places)


def test_plots_of_little() -> None:
    assert charts.plot([charts.Series("a", [])], "x", "y") is None
    alone = charts.plot([charts.Series("a", [(5.0, 5.0)], "points")], "x", "y")
    assert alone is not None
    assert "nan" not in alone
    many = charts.distribution("a", [float(i) for i in range(10_000)])
    assert len(many.points) <= 401
    assert many.points[-1] == (9999.0, 1.0)
    text = charts.bars(["one", "<two>"], [("a", [0.5, 0.0])], "share")
    assert "&lt;two&gt;" in text
