"""`kdecode serve` and `kdecode generate` whose model several processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from processes import until
from ranked_engines import names_left
from server_process import running
from two_hosts import on_two_hosts, require_namespaces

LIMIT_S = 60.0
KDECODE = str(Path(sys.executable).with_name("kdecode"))
FLAGS = ("-tp", "2", "--max-model-len", "128", "--max-num-seqs", "3", "--block-size", "16")
# The follower has a fault in its first step of a kind.
BEFORE = """
from functools import partial
sys.path.append({folder!r})
import kdecode.engine.leader
from engine_faults import Fault, follow_until
kdecode.engine.leader.follow = partial(follow_until, Fault(1, {kind!r}, {phase!r}, {stamp!r}))
"""
LONG = {"model": "mini", "prompt": "a", "max_tokens": 100, "ignore_eos": True}


@contextmanager
def _serving(
    checkpoint: Path, *flags: str, kind: str = "", phase: str = "", stamp: str = ""
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, list[int]]]:
    """The process, a client, and the processes of the followers, of which none is left."""
    folder = str(Path(__file__).parent)
    before = BEFORE.format(folder=folder, kind=kind, phase=phase, stamp=stamp) if kind else ""
    with running(checkpoint, *FLAGS, *flags, before=before) as (process, url):
        followers = _children(process.pid)
        assert len(followers) == 1
        with httpx.Client(base_url=url, timeout=60) as client:
            yield process, client, followers
        until(lambda: not any(Path(f"/proc/{one}").exists() for one in followers))
    assert not names_left((*followers, process.pid))


def test_a_server_of_two_ranks_serves_and_ends(mini_16_checkpoint: Path) -> None:
    with _serving(mini_16_checkpoint, "--decode-backend", "latency_specialized") as served:
        process, client, _ = served
        reply = client.post("/v1/completions", json={**LONG, "max_tokens": 5}).json()
        assert reply["usage"]["completion_tokens"] == 5
        config = client.get("/config/fingerprint").json()["config"]
        assert config["tensor_parallel_size"] == 2
        assert config["decode_context_parallel_size"] == 1
        assert 'kdecode:tensor_parallel_size{engine="0",model_name="mini"} 2.0' in (
            client.get("/metrics").text
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("kind", "phase", "words"),
    [
        ("kill", "decode", "died with signal 9"),
        pytest.param(
            "stop", "prefill", "is stopped and has given no sign of life", marks=pytest.mark.slow
        ),
    ],
)
def test_requests_of_a_broken_group_name_the_rank_and_the_server_ends_with_1(
    tmp_path: Path, mini_16_checkpoint: Path, kind: str, phase: str, words: str
) -> None:
    stamp = tmp_path / "stamp"
    fault = {"kind": kind, "phase": phase, "stamp": str(stamp)}
    with _serving(mini_16_checkpoint, **fault) as (process, client, followers):
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda _: client.post("/v1/completions", json=LONG), range(3)))
        # 500 ends what was running; what the engine had not taken in yet may be sent again: 503.
        assert 500 in {reply.status_code for reply in replies}
        for reply in replies:
            assert reply.status_code in (500, 503)
            message = reply.json()["error"]["message"]
            assert f"RankError: Rank 1 of 2 (process {followers[0]}) {words}" in message
        assert process.wait(LIMIT_S) == 1
        assert time.monotonic() - float(stamp.read_text()) < LIMIT_S


def test_a_rank_that_dies_while_nothing_runs_ends_the_server(mini_16_checkpoint: Path) -> None:
    with _serving(mini_16_checkpoint) as (process, client, followers):
        assert client.get("/health").status_code == 200
        os.kill(followers[0], signal.SIGKILL)
        assert process.wait(LIMIT_S) == 1


def test_torchrun_starts_the_ranks_of_a_command(mini_16_checkpoint: Path) -> None:
    arguments = ["generate", str(mini_16_checkpoint), "--prompt", "a", "--max-tokens", "4"]
    arguments += ["--threads", "1", "--decode-backend", "latency_specialized", "-tp", "2"]
    plain = subprocess.run([KDECODE, *arguments], capture_output=True, text=True, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "--no-python", KDECODE, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    # Rank 0 alone says what the model said.
    assert found.stdout == plain.stdout
    assert found.stdout.strip()


@pytest.mark.slow
def test_two_hosts_say_what_one_says(mini_16_checkpoint: Path) -> None:
    require_namespaces()
    arguments = ["generate", str(mini_16_checkpoint), "--prompt", "a", "--max-tokens", "4"]
    arguments += ["--threads", "1", "-tp", "2"]
    plain = subprocess.run([KDECODE, *arguments], capture_output=True, text=True, check=True)
    torchrun = ["--nproc-per-node", "1", "--no-python", KDECODE, *arguments]
    found = subprocess.run(on_two_hosts(*torchrun), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    torchrun += ["--decode-backend", "latency_specialized"]
    refused = subprocess.run(on_two_hosts(*torchrun), capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "memory that all ranks share; the 2 ranks are on 2 hosts" in refused.stderr


def _children(parent: int) -> list[int]:
    """Followers of a process: what multiprocessing has spawned, but for its own helper."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(state[1]) == parent and b"spawn_main" in command:
            found.append(int(folder.name))
    return found
