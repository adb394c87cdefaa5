"""How requests end when their clients do, what is let in, metrics, and the process."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_model import KEY, Served
from server_process import running, start, started

from kdecode import cli
from kdecode.model.chat import K3_MARKERS, KIMI_LINEAR_MARKERS

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
LONG = {"model": "mini", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 3}


def _wait_until_running(served: Served) -> None:
    deadline = time.monotonic() + 60
    while not served.llm.stats()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(served: Served, stream: bool) -> None:
    """Their replies end as aborted, not at their length."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    port = int(served.url.rsplit(":", 1)[1])
    before = served.num_aborted()
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        fields = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        client.sendall(f"{head}{fields}\r\n".encode() + body)
        _wait_until_running(served)
        if stream:
            assert b"200 OK" in client.recv(1000)
    served.wait_for_aborted(before + 3)


def test_a_client_of_a_stream_may_stop_reading_early(served: Served) -> None:
    before = served.num_aborted()
    for _ in range(3):
        stream = served.client.completions.create(
            model="mini", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    served.wait_for_aborted(before + 3)


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", "Bearer é"])
def test_a_wrong_key_is_refused(served: Served, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key.encode()}
    for path in ("/v1/models", "/config/fingerprint", "/tokenize", "/openapi.json"):
        response = httpx.get(served.url + path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/version", "/metrics"):
        assert httpx.get(served.url + path, headers=headers).status_code == 200


def _chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 1000 + 1):
        yield b" " * 1000


def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    for content in (b" " * 100_001, _chunks(101_000)):
        response = httpx.post(f"{served.url}/v1/completions", content=content, headers=HEADERS)
        assert response.status_code == 413
        assert "100,000 bytes" in response.json()["error"]["message"]


def test_a_body_that_does_not_come_times_out(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as client:
        fields = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 5\r\n"
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n".encode())
        client.settimeout(5)
        assert b"408" in client.recv(1000)


def _metric(served: Served, pattern: str) -> float:
    text = httpx.get(f"{served.url}/metrics").text
    found = [line for line in text.splitlines() if re.match(pattern, line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_metrics_count_what_happened(served: Served) -> None:
    names = {
        "prompt": "vllm:prompt_tokens_total",
        "generated": "vllm:generation_tokens_total",
        "length": 'vllm:request_success_total{.*finished_reason="length"',
        "first": "vllm:time_to_first_token_seconds_count",
        "gaps": "vllm:inter_token_latency_seconds_count",
        "per token": "vllm:request_time_per_output_token_seconds_count",
        "queue": "vllm:request_queue_time_seconds_count",
        "e2e": "vllm:e2e_request_latency_seconds_count",
        "steps": 'kdecode:decode_steps_total{.*path="specialized",reason=""',
        "step tokens": "vllm:iteration_tokens_total_sum",
        "step time": 'kdecode:step_time_seconds_count{.*kind="decode",.*path="specialized"}',
    }
    before = {name: _metric(served, pattern) for name, pattern in names.items()}
    served.client.completions.create(
        model="mini", prompt=[1, 2, 3], max_tokens=5, extra_body={"ignore_eos": True}
    )
    served.wait_until_idle()
    moved = {name: _metric(served, pattern) - before[name] for name, pattern in names.items()}
    assert moved == {
        "prompt": 3,
        "generated": 5,
        "length": 1,
        "first": 1,
        "gaps": 4,
        "per token": 1,
        "queue": 1,
        "e2e": 1,
        "steps": 4,
        "step tokens": 7,
        "step time": 4,
    }
    assert 0 < _metric(served, "kdecode:coverage") <= 1
    assert _metric(served, 'vllm:inter_token_latency_seconds_bucket.*le="0.0001"') >= 0
    assert _metric(served, 'vllm:cache_config_info{.*block_size="64"') == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--additional-config", '{"decode_backend": "fast"}'], "decode_backend is 'fast'"),
        (["--additional-config", '{"tree": 1}'], "'tree'"),
        (["--additional-config", "[]"], "not a JSON object"),
        (
            [
                *("--additional-config", '{"decode_backend": "auto"}'),
                *("--decode-backend", "latency_specialized"),
            ],
            "but --additional-config says 'auto'",
        ),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype"),
        (["--enforce-eager"], "--enforce-eager"),
        (["--max-num", "3"], "--max-num"),
        (["--reasoning-parser", "deepseek_r1"], "--reasoning-parser"),
        (["--config", "/no/such/file"], "/no/such/file cannot be read"),
        (["--port", "70000"], "'70000' is not a port"),
        (["--cache-scale", "1.0"], "only an fp8 cache has a scale"),
    ],
)
def test_a_flag_that_would_not_act_is_refused(
    mini_checkpoint: Path, capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.main(["serve", str(mini_checkpoint), *flags]) == 2
    assert message in capfd.readouterr().err


def test_sigterm_lets_running_requests_end(mini_checkpoint: Path) -> None:
    flags = ("--max-model-len", "256", "--served-model-name", "m")
    additional = '{"decode_backend": "latency_specialized"}'
    process, url = start(mini_checkpoint, *flags, "--additional-config", additional)
    assert url.startswith("http://127.0.0.1:")
    try:
        config = httpx.get(f"{url}/config/fingerprint").json()["config"]
        assert config["decode_backend"] == "latency_specialized"
        assert config["max_context_tokens"] == 256
        body: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 200, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        usage = json.loads(events[-2].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 200
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


# A step takes 50 ms, whatever the machine.
SLOW_STEPS = (
    "import time\nfrom kdecode.engine.loop import StepLoop\nstep = StepLoop.step\n"
    "StepLoop.step = lambda self: (time.sleep(0.05), step(self))[1]"
)
LONG_STREAM = {**LONG, "n": 1, "max_tokens": 4000, "stream": True}


def test_requests_that_outlast_the_drain_time_are_told(mini_checkpoint: Path) -> None:
    """Slow steps, so that no reply is complete by then."""
    with running(mini_checkpoint, "--drain-seconds", "1", before=SLOW_STEPS) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG_STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_stopped"
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "still run after 1 seconds" in log
        assert "Traceback" not in log


def test_a_body_that_never_comes_does_not_hold_the_end_up(mini_checkpoint: Path) -> None:
    with running(mini_checkpoint, "--drain-seconds", "1") as (process, url):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "cut off by the end of the server" in log
        assert "Traceback" not in log


def test_a_fault_of_the_engine_ends_the_process(mini_checkpoint: Path) -> None:
    """A fault outside of a step, after which nothing is known of any request."""
    before = (
        "from kdecode.engine.scheduler import Scheduler\n"
        "def broken(self): raise RuntimeError('a made-up fault')\n"
        "Scheduler.schedule = broken"
    )
    with running(mini_checkpoint, before=before) as (process, url):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert response.status_code == 503
        assert "a made-up fault" in response.json()["error"]["message"]
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "the engine broke" in log


def test_kill_and_restart(mini_checkpoint: Path) -> None:
    """A client of a killed server gets an error at once, and the port serves again."""
    with running(mini_checkpoint) as (process, url):
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=LONG_STREAM, timeout=10
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", timeout=60)
    port = url.rsplit(":", 1)[1]
    with running(mini_checkpoint, "--port", port) as (_, again):
        assert again == url
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_flags_from_a_file(mini_checkpoint: Path, tmp_path: Path) -> None:
    """Of every kind of value; the command line wins."""
    path = tmp_path / "flags.yaml"
    path.write_text(
        f"model: {mini_checkpoint}\nmax-model-len: 256\nmax_num_seqs: 3\nthreads: 1\n"
        "served-model-name: [a, b]\nadditional-config: {decode_backend: latency_specialized}\n"
        "reasoning-parser: kimi_k3\nenable-auto-tool-choice: true\nverbose-nothing: null\n"
    )
    argv = ["serve", "--port", "0", f"--config={path}", "--max-num-seqs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kdecode.cli", *argv], stderr=subprocess.PIPE, text=True
    )
    try:
        url = started(process)
        config = httpx.get(f"{url}/config/fingerprint").json()["config"]
        assert config["decode_backend"] == "latency_specialized"
        assert config["max_context_tokens"] == 256
        assert config["cache"]["slots"] == 2
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        assert names == ["a", "b"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: [", "cannot be read"),
        ("- 1", "not a list of `name: value`"),
        ("beam: 3", "--beam=3"),
        ("port: many", "'many' is not a port"),
        ("config: other.yaml", "names another one"),
        ("model: 3", "model is 3"),
    ],
)
def test_a_file_of_flags_that_cannot_be_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    assert cli.main(["serve", "--config", str(path)]) == 2
    assert message in capfd.readouterr().err


def test_parsers_are_the_models_own(
    tmp_path: Path, mini_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model of the other chat format has neither."""
    shutil.copytree(mini_checkpoint, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    text = path.read_text()
    for name, other in zip(K3_MARKERS, KIMI_LINEAR_MARKERS, strict=False):
        text = text.replace(name, other)
    path.write_text(text.replace("[start_header_id]", "<|im_end|>"))
    assert cli.main(["serve", str(tmp_path), "--tool-call-parser", "kimi_k3"]) == 2
    assert "does nothing for this model" in capfd.readouterr().err


def test_a_header_that_does_not_come_ends_the_connection(mini_checkpoint: Path) -> None:
    """On a new connection and on one that has served a request; replies take as long as they do."""
    limit = "from kdecode.commands import draining_server\ndraining_server.HEADER_SECONDS = 1"
    before = f"{limit}\n{SLOW_STEPS}"
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(mini_checkpoint, before=before) as (_, url):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        for first in (b"", b"GET /health HT", request):
            with socket.create_connection(address) as client:
                client.settimeout(60)
                client.sendall(first)
                if first == request:
                    assert b"200 OK" in client.recv(1000)
                    client.sendall(b"GET /hea")
                begin = time.monotonic()
                assert client.recv(1000) == b""
                assert time.monotonic() - begin > 0.5
        begin = time.monotonic()
        slow = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}
        response = httpx.post(f"{url}/v1/completions", json=slow, timeout=60)
        assert response.json()["usage"]["completion_tokens"] == 40
        assert time.monotonic() - begin > 1


def test_a_taken_port_is_refused_before_the_model_is_opened(
    mini_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdecode.commands.serve.open_model", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(mini_checkpoint), "--port", str(port)]) == 2
    message = f"cannot listen on 127.0.0.1, port {port}: Address already in use"
    assert message in capsys.readouterr().err
    assert cli.main(["serve", str(mini_checkpoint), "--host", "203.0.113.7"]) == 2
    assert "cannot listen on 203.0.113.7, port 8000: " in capsys.readouterr().err


def test_only_the_process_of_torchrun_that_listens_needs_the_port(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def open_model(directory: Path, config: object) -> None:
        opened.append(directory)
        raise SystemExit(0)  # as of a follower, when rank 0 is done

    monkeypatch.setattr("kdecode.commands.serve.open_model", open_model)
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    # An address of rank 0's host, not of this one.
    with pytest.raises(SystemExit):
        cli.main(["serve", str(mini_checkpoint), "-tp", "2", "--host", "203.0.113.7"])
    assert opened == [mini_checkpoint]
