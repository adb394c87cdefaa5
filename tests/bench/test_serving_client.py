"""The client on a scripted server in simulated time: the worked example, faults of streams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from mock_server import MockServer, play
from simulated import simulate

from kdecode.bench.metrics import MetricError
from kdecode.bench.serving.client import Client, ServedRecord
from kdecode.bench.serving.facts import read_facts
from kdecode.bench.serving.http import HttpError, Target, exchange
from kdecode.bench.serving.load import Load
from kdecode.bench.serving.reply import events, read_stream
from kdecode.bench.workloads.types import Request, Workload, WorkloadError

IDS = tuple(range(1, 51))


def ask(folder: Path, server: MockServer, request: Request | None = None) -> ServedRecord:
    async def main() -> ServedRecord:
        async with server.running() as url:
            client = Client("a", Target.from_url(url))
            return await client.send(request or Request("r", 40, prompt_ids=IDS))

    record: ServedRecord = simulate(folder, main())
    return record


def test_worked_example_to_the_digit(tmp_path: Path) -> None:
    """Ten chunks of 4 tokens, the first after 200 ms, then one every 10 ms."""
    record = ask(tmp_path, MockServer(tokens_per_chunk=4))
    metrics, reply = record.metrics(), record.reply
    assert metrics is not None
    assert reply is not None
    assert (metrics.n, metrics.f, reply.token_source) == (40, 4, "usage per chunk")
    assert (metrics.ttft_s, metrics.e2e_s, metrics.decode_s) == (0.2, 0.29, 0.09)
    assert metrics.tpot_s == pytest.approx(2.5e-3, rel=1e-12)
    assert metrics.decode_tps == pytest.approx(400, rel=1e-12)
    assert f"{1e3 * (metrics.tpot_n1_s or 0):.2f}" == "2.31"
    assert metrics.icl_s == (0.01,) * 9
    assert metrics.ntpot_s == pytest.approx(7.25e-3, rel=1e-12)
    assert f"{metrics.e2e_tps:.1f}" == "137.9"


def test_chunks_are_not_tokens(tmp_path: Path) -> None:
    """F2: usage at the end alone gives the sum, and never a count of chunks in its place."""
    record = ask(tmp_path, MockServer(tokens_per_chunk=4, usage="end"))
    metrics, reply = record.metrics(), record.reply
    assert metrics is not None
    assert reply is not None
    assert (metrics.n, metrics.f, reply.token_source) == (40, None, "usage at the end")
    assert (metrics.tpot_s, metrics.decode_tps) == (None, None)
    assert metrics.ntpot_s == pytest.approx(7.25e-3)


def test_one_token_a_chunk_needs_no_usage_per_chunk(tmp_path: Path) -> None:
    record = ask(tmp_path, MockServer(usage="end"), Request("r", 5, prompt_ids=IDS))
    assert record.reply is not None
    assert record.reply.token_source == "usage at the end, one token a chunk"
    assert record.reply.chunk_tokens == (1,) * 5


@pytest.mark.parametrize(
    ("texts", "source", "chunk_tokens"),
    [
        (["a", "b", "c"], "usage at the end, one token a chunk", (1, 1, 1)),
        # A token that is half a character waits for the next one.
        (["a", "bc"], "usage at the end", None),
    ],
)
def test_usage_beside_the_last_choice_is_usage_at_the_end(
    texts: list[str], source: str, chunk_tokens: tuple[int, ...] | None
) -> None:
    """As llama.cpp's server sends it: all tokens in an event that has a choice and no text."""
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    documents: list[dict[str, Any]] = [
        *({"choices": [{"index": 0, "text": text}]} for text in texts),
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage},
    ]
    reads = [
        (place, b"data: " + json.dumps(document).encode() + b"\n\n")
        for place, document in enumerate(documents)
    ]
    reply = read_stream([*reads, (9, b"data: [DONE]\n\n")])
    assert (reply.token_source, reply.chunk_tokens) == (source, chunk_tokens)
    assert reply.chunk_ns == tuple(range(len(texts)))
    assert (reply.output_tokens, reply.finish_reason) == (3, "length")


def test_a_server_without_usage_is_no_measurement(tmp_path: Path) -> None:
    record = ask(tmp_path, MockServer(usage="none"))
    assert record.timing is None
    assert "chunks are no tokens" in (record.error or "")


def test_reasoning_counts_for_the_first_token(tmp_path: Path) -> None:
    """F4: a stream of nothing but reasoning has a time to first token, and no time to answer."""
    chat = Request("r", 8, messages=({"role": "user", "content": "?"},))
    record = ask(tmp_path, MockServer(channel="reasoning"), chat)
    assert record.metrics() is not None
    assert record.metrics().ttft_s == 0.2  # type: ignore[union-attr]
    assert record.answer_s is None
    assert ask(tmp_path, MockServer(), chat).answer_s == 0.2


def test_failures_are_records(tmp_path: Path) -> None:
    record = ask(tmp_path, MockServer(fail_every=1))
    assert record.timing is None
    assert "status 500" in (record.error or "")
    assert "scripted failure" in (record.error or "")


def test_a_request_says_what_it_wants(tmp_path: Path) -> None:
    server = MockServer()
    ask(tmp_path, server, Request("r", 3, prompt_ids=(5, 6)))
    assert server.log == [
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 3,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "prompt": [5, 6],
        }
    ]


def workload(number: int, **changes: Any) -> Workload:
    return Workload(
        "w", tuple(Request(f"r{i}", 5, prompt_ids=IDS, **changes) for i in range(number))
    )


def test_a_closed_loop_keeps_as_many_alive_as_asked(tmp_path: Path) -> None:
    found = play(tmp_path, MockServer(), workload(6), Load(concurrency=2))
    sends = [round((r.send_ns - found.begin_ns) / 1e6) for r in found.records]
    assert sends == [0, 0, 240, 240, 480, 480]
    assert (found.planned, found.sent, found.completed) == (6, 6, 6)
    assert max(found.lags_s) == pytest.approx(0, abs=1e-6)


def test_an_open_loop_sends_when_it_is_time(tmp_path: Path) -> None:
    requests = tuple(Request(f"r{i}", 5, prompt_ids=IDS, at_s=0.1 * i) for i in range(4))
    found = play(tmp_path, MockServer(), Workload("w", requests), Load(speed=2.0))
    assert [round((r.send_ns - found.begin_ns) / 1e6) for r in found.records] == [0, 50, 100, 150]
    assert all(record.metrics().queue_s == pytest.approx(0, abs=1e-6) for record in found.records)  # type: ignore[union-attr]
    with pytest.raises(WorkloadError, match="no time to begin"):
        Load().starts_s([[Request("r", 5, prompt="x")]])


def test_a_rate_is_poisson_and_seeded() -> None:
    sessions = [[Request(f"r{i}", 5, prompt="x")] for i in range(400)]
    times = Load(rate=10.0, seed=3).starts_s(sessions)
    assert times == Load(rate=10.0, seed=3).starts_s(sessions)
    assert times[-1] == pytest.approx(40, rel=0.15)
    assert times[0] == 0


def chat(contents: list[str], turn: int) -> Request:
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents))
    return Request(
        f"s{turn}", 2, messages=messages, session="s", turn=turn, at_s=0.0, delay_s=0.5 * turn
    )


@pytest.mark.parametrize("mode", ["recorded", "live"])
def test_turns_wait_for_each_other_and_replies_are_of_one_kind(tmp_path: Path, mode: Any) -> None:
    turns = (chat(["hi"], 0), chat(["hi", "recorded", "more"], 1))
    server = MockServer()
    found = play(tmp_path, server, Workload("w", turns, mode), Load())
    assert [round((r.send_ns - found.begin_ns) / 1e6) for r in found.records] == [0, 710]
    reply = {"recorded": "recorded", "live": "t0 t1 "}[mode]
    sent = [message["content"] for message in server.log[1]["messages"]]
    assert sent == ["hi", reply, "more"]


def test_a_failed_turn_ends_its_session(tmp_path: Path) -> None:
    turns = (chat(["hi"], 0), chat(["hi", "recorded", "more"], 1))
    found = play(tmp_path, MockServer(fail_every=1), Workload("w", turns), Load())
    assert (found.planned, found.sent, found.completed) == (2, 1, 0)


def test_events_may_be_cut_anywhere() -> None:
    stream = b': hello\r\n\r\ndata: {"a":\ndata: 1}\n\nevent: x\nid: 3\ndata: [DONE]\r\n\r\n'
    for cut in range(1, len(stream)):
        found = list(events([(1, stream[:cut]), (2, stream[cut:])]))
        assert [data for _, data in found] == ['{"a":\n1}', "[DONE]"]
        assert found[1][0] == 2
    one_by_one = [(i, stream[i : i + 1]) for i in range(len(stream))]
    assert [data for _, data in events(one_by_one)] == ['{"a":\n1}', "[DONE]"]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"data: {\n\n", "not JSON"),
        (b"data: [1]\n\n", "no object"),
        (b'data: {"error": {"message": "broke"}}\n\n', "broke"),
        (b'data: {"choices": []}\n\n', r"without \[DONE\]"),
    ],
)
def test_half_a_stream_is_no_reply(stream: bytes, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        read_stream([(1, stream)])


def test_tokens_of_one_read_are_one_chunk() -> None:
    def event(text: str, so_far: int) -> bytes:
        usage = f'"usage": {{"completion_tokens": {so_far}}}'
        return f'data: {{"choices": [{{"text": "{text}"}}], {usage}}}\n\n'.encode()

    end = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\ndata: [DONE]\n\n'
    # A chunk without text has its tokens all the same, and one without tokens is none.
    reads = [(5, event("a", 1) + event("", 3)), (7, event("b", 3)), (9, event("c", 4)), (10, end)]
    reply = read_stream(reads)
    assert (reply.chunk_ns, reply.chunk_tokens) == ((5, 9), (3, 1))
    assert reply.content == "abc"


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "http://", "http://x:99999", "http://x/?a"),
        *("http://[", "http://x:0", "http://xä", "http://x/ä"),
    ],
)
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(HttpError):
        Target.from_url(url)


def test_addresses() -> None:
    assert Target.from_url("127.0.0.1:8000/v1/").base == ""
    assert Target.from_url("https://host/api/v1") == Target("https", "host", 443, "/api")
    assert Target.from_url("http://[::1]:80").authority == "[::1]:80"


@pytest.mark.parametrize(
    ("sent", "status", "body", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcd", 200, b"abc", None),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", 200, b"abc", None),
        (b"HTTP/1.1 204 No\r\n\r\n", 204, b"", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", 200, b"abc", "closed"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
            200,
            b"abc",
            None,
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n", 200, b"", "zz"),
        (b"nonsense\r\n\r\n", 0, b"", "nonsense"),
    ],
)
def test_framing_whatever_the_reads(
    tmp_path: Path, sent: bytes, status: int, body: bytes, error: str | None
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for place in range(len(sent)):
            writer.write(sent[place : place + 1])
            await asyncio.sleep(0.001)
        writer.close()

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        await asyncio.start_unix_server(serve, loop.path("x", 1))  # type: ignore[attr-defined]
        return await exchange(Target.from_url("http://x:1"), "GET", "/")

    if not status:
        with pytest.raises(HttpError, match=error):
            simulate(tmp_path, main())
        return
    found = simulate(tmp_path, main())
    assert found.status == status
    if error is None:
        assert (found.body, found.error) == (body, None)
        stamps = [stamp for stamp, _ in found.reads]
        assert len(set(stamps)) == len(stamps) == len(body)
    else:
        assert error in found.error


def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    async def main() -> ServedRecord:
        async with MockServer(prefill_ms=10_000).running() as url:
            client = Client("a", Target.from_url(url), timeout_s=1.0)
            return await client.send(Request("r", 2, prompt="x"))

    assert "within 1 s" in (simulate(tmp_path, main()).error or "")


def test_nobody_listens(tmp_path: Path) -> None:
    async def main() -> ServedRecord:
        return await Client("a", Target.from_url("http://nobody:1")).send(
            Request("r", 2, prompt="x")
        )

    assert "http://nobody:1/v1/completions" in (simulate(tmp_path, main()).error or "")


def test_a_host_without_a_name_is_told() -> None:
    with pytest.raises(HttpError, match="label"):
        asyncio.run(exchange(Target.from_url("http://a..b"), "GET", "/"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "is no object"),
        (b"<html>", "is not JSON"),
        (b'{"data": null}', "serves no model"),
        (b'{"data": [1, {}]}', "serves no model"),
    ],
)
def test_a_server_of_something_else_is_told(body: bytes, message: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async def ask_it() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            await read_facts(Client("a", Target.from_url(f"127.0.0.1:{port}")))

    with pytest.raises(HttpError, match=message):
        asyncio.run(ask_it())
