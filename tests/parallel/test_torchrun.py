"""Ranks that torchrun has started: on this host, and on two, which are network namespaces."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from two_hosts import on_two_hosts, require_namespaces

from kdecode.config import ConfigError, TorchRun, torch_run
from kdecode.parallel.launch import _require_loopback

SCRIPT = str(Path(__file__).with_name("leader_process.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT_S = 120.0


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    for name in (*names, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert torch_run() is None
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        torch_run()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    host = os.uname().nodename
    assert torch_run() == TorchRun(1, 4, host, "10.0.0.1", 29500, None)
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert torch_run() == TorchRun(1, 4, "3", "10.0.0.1", 29500, "eth1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert torch_run() == TorchRun(1, 4, "3", "10.0.0.1", 29500, "eth1", 0, 2)
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'first'"):
        torch_run()
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'four'"):
        torch_run()


def test_ranks_of_torchrun_exchange_and_end() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, "2", "5", "sums"]
    with _running(command) as run:
        told, text = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, text
    assert "the sums are right on 1 hosts" in told


@pytest.mark.slow
def test_another_number_of_processes_is_refused() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, "4", "5", "sums"]
    with _running(command) as run:
        _, text = run.communicate(timeout=LIMIT_S)
    assert run.returncode != 0
    assert "tensor_parallel_size is 4, but torchrun has started 2 processes" in text


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_of_torchrun_that_dies_or_stands_still_is_named(fault: str) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, "2", "2", "exchanges"]
    with _running(command) as run:
        assert run.stdout is not None
        (process,) = re.findall(r"[0-9]+", run.stdout.readline())
        os.kill(int(process), number)
        begin = time.monotonic()
        assert run.stderr is not None
        lines = iter(run.stderr.readline, "")
        error = next(line for line in lines if "RankError: Rank" in line)
        assert time.monotonic() - begin < 10
        assert f"Rank 1 of 2 (process {process})" in error
        # torchrun itself gives the others half a minute.
        os.kill(int(process), signal.SIGKILL)
        run.communicate(timeout=LIMIT_S)
    assert run.returncode != 0


@pytest.mark.slow
def test_followers_of_torchrun_end_with_rank_0() -> None:
    """They are not its children, and a signal of torchrun's does not end them."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", SCRIPT, "3", "5", "dies"]
    with _running(command) as run:
        assert run.stdout is not None
        processes = re.findall(r"[0-9]+", run.stdout.readline())
        begin = time.monotonic()
        run.communicate(timeout=LIMIT_S)
        # torchrun waits for all of them, and kills those that are left after half a minute.
        assert time.monotonic() - begin < 20
    assert run.returncode != 0
    assert len(processes) == 2
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.slow
def test_two_hosts_exchange() -> None:
    require_namespaces()
    command = on_two_hosts("--nproc-per-node", "2", SCRIPT, "4", "5", "sums")
    with _running(command) as run:
        told, text = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, text
    assert "the sums are right on 2 hosts" in told


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A session of its own, of which nothing is left."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            yield run
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def test_a_rank_that_waits_for_the_others_says_so_and_ends_with_a_signal(
    mini_16_checkpoint: Path,
) -> None:
    """As a shell does in which another program's RANK and WORLD_SIZE are still set."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [str(Path(sys.executable).with_name("kdecode")), "generate", str(mini_16_checkpoint)]
    with subprocess.Popen(
        [*command, "--prompt", "a", "-tp", "2"],
        env=os.environ | told,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waits for the others" in line)
        assert f"rank 0 of 2 waits for the others at 127.0.0.1:{port}" in line
        assert "because RANK and WORLD_SIZE are set" in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_host_without_loopback_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConfigError, match=r"nothing can be reached there on this host"):
        _require_loopback(port)
