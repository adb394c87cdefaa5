"""`kdecode bench peers --server`: our own server beside a program that plays `llama-server`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from test_peers_command import _write_logits, programs  # noqa: F401

from kdecode.bench.server_peers import ServerPass, server_ratio
from kdecode.cli import main

# Of a reply. Ours has the shortest steps there are, and a client that waits for a core reads all
# tokens of that time as one chunk; so many are not over before it has had one.
REPLY_TOKENS = 256
# Serves completions of "w " a token, 2 ms apart, and the usage behind them.
PLAYER = """#!{python}
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
words = sys.argv[1:]
assert words[words.index("-np") + 1] == "2" and words[words.index("-t") + 1] == "1"
assert int(words[words.index("-c") + 1]) >= 2 * (8 + {tokens})

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *arguments): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        {first}
        number = body["max_tokens"]
        assert body["stream"] and body["ignore_eos"] and len(body["prompt"]) == 8
        self.send_response({status})
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(number):
            self.event({{"choices": [{{"index": 0, "text": "w "}}]}})
            time.sleep(0.002)
        self.event({{"choices": [], "usage": {{"prompt_tokens": 8, "completion_tokens": number}}}})
        self.wfile.write(b"data: [DONE]\\n\\n")
        self.close_connection = True
    def event(self, document):
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\\n\\n")
        self.wfile.flush()

ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


def _command(model: Path, *more: str) -> list[str]:
    size = ["--context-tokens", "8", "--output-tokens", str(REPLY_TOKENS)]
    size += ["--concurrency", "1", "2"]
    passes = ["--requests-per-slot", "1", "--blocks", "2", "--threads", "1"]
    arms = ["--decode-backend", "latency_specialized", "--agreement-tokens", "8"]
    return ["bench", "peers", str(model), "--server", *size, *passes, *arms, *more]


def _play(programs: Path, status: int, first: str = "") -> None:  # noqa: F811
    """first: what it does when it is asked."""
    player = programs.parent / "bin" / "llama-server"
    settings = {"status": status, "first": first, "tokens": REPLY_TOKENS}
    player.write_text(PLAYER.format(python=sys.executable, **settings))
    player.chmod(0o755)


def test_our_server_beside_another(
    mini_checkpoint: Path,
    programs: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.0)
    _play(programs, 200)
    assert main(_command(mini_checkpoint, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in found["arms"]] == [
        "kdecode latency_specialized",
        "llama.cpp server",
    ]
    # Two passes of each server in each of two blocks, at each concurrency.
    places = [(one["concurrency"], one["arm"]) for one in found["passes"]]
    assert {place: places.count(place) for place in places} == {
        (concurrency, arm): 4 for concurrency in (1, 2) for arm in (0, 1)
    }
    theirs = [one for one in found["passes"] if one["arm"] == 1]
    assert all(0.002 <= one["icl_p90_s"] < 1 for one in theirs)
    # A token takes 2 ms; two at a time have at most twice as many a second.
    assert all(0 < one["output_tps"] <= 500 * one["concurrency"] for one in theirs)
    assert [ratio["refusal"] for ratio in found["ratios"]] == [None, None]
    assert all(ratio["output_tps"]["num_pairs"] == 4 for ratio in found["ratios"])


def test_a_server_whose_requests_fail_gets_no_figures(
    mini_checkpoint: Path,
    programs: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.0)
    assert main(_command(mini_checkpoint)) == 2
    assert "llama-server not found" in capsys.readouterr().err
    _play(programs, 500)
    assert main(_command(mini_checkpoint)) == 2
    assert "requests failed; the first: status 500" in capsys.readouterr().err


def test_a_signal_ends_the_servers(
    mini_checkpoint: Path,
    programs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """In the middle of a reply, where an exception would be the end of a callback alone."""
    _write_logits(mini_checkpoint, programs, shift=0.0)
    pid = tmp_path / "pid"
    kill = "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    _play(programs, 200, f"open({str(pid)!r}, 'w').write(str(os.getpid())); {kill}")
    assert main(_command(mini_checkpoint)) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    # Ours, too: nothing of this process is left.
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if str(mini_checkpoint).encode() in command]


def test_ratios_are_of_pairs_with_the_same_requests() -> None:
    """The machine is twice as slow in the second block, which no ratio sees."""
    passes = [
        ServerPass(
            concurrency=1,
            block=block,
            arm=arm,
            output_tps=speed / (1 + block),
            icl_p50_s=0.01,
            icl_p90_s=(1 + block) / speed,
            ttft_p50_s=0.1,
            tokens_per_chunk=1.0,
        )
        for block in (0, 1)
        for arm, speed in ((0, 30.0), (1, 20.0), (1, 20.0), (0, 30.0))
    ]
    speed = server_ratio(passes, 0, 1, lambda one: 1 / one.output_tps, seed=0)
    gaps = server_ratio(passes, 0, 1, lambda one: one.icl_p90_s, seed=0)
    for found in (speed, gaps):
        assert found.ratio == pytest.approx(1.5)
        assert (found.num_pairs, found.num_blocks) == (4, 2)
