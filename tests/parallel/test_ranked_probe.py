"""`bench layer` with a GPU for each rank, as far as it shows without one: processes with pretended
GPUs, whose graphs are tapes and whose clocks count what is on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_cases import CONFIGS
from pretend_device import pretend_cuda
from pretended_gpus import PATCHES, SYMMETRIC_PATCHES
from pretended_graphs import GRAPH_PATCHES, TIMING_PATCHES, follow_timed
from rank_cuts import divisible

from kdecode.cli import main
from kdecode.commands import bench_shape
from kdecode.engine import ranked_probe

SHAPE = ("bench", "layer", "--shape", "kimi-k3", "--device", "cuda")
# Launches a layer and exchanges, of which NCCL's are launches of their own.
KINDS = {"KDA + dense": (7, 2), "KDA + MoE": (10, 4), "MLA + MoE": (13, 4)}
BY_NCCL = {"KDA + dense": (7 + 2, 2), "KDA + MoE": (11 + 4, 4), "MLA + MoE": (14 + 4, 4)}


class Probe:
    """Of a memory that is read at one byte a microsecond."""

    def bytes_per_second(self) -> float:
        return 1e6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has a pretended GPU and its clock; the release is a small model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for patch in (*PATCHES, *SYMMETRIC_PATCHES, *GRAPH_PATCHES, *TIMING_PATCHES):
        monkeypatch.setattr(*patch)
    config = divisible(CONFIGS["k3"])
    monkeypatch.setattr("kdecode.model.rank_share.release_config", lambda name, layers: config)
    monkeypatch.setattr(ranked_probe, "follow", follow_timed)
    monkeypatch.setattr(ranked_probe, "check_devices", lambda engine: None)
    monkeypatch.setattr(bench_shape, "read_probe", lambda config: Probe())
    monkeypatch.setattr(bench_shape, "_bytes", lambda name, size: ({}, []))
    with pretend_cuda():
        yield
    torch.set_num_threads(threads)


def _timed(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    code = main(
        [*SHAPE, "-tp", "2", "--layers", "3", "--context-tokens", "9", "--runs", "2", *more]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out) if "--json" in more else out


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("transport", "kinds"),
    [("symmetric", KINDS), pytest.param("nccl", BY_NCCL, marks=pytest.mark.slow)],
)
def test_all_ranks_of_a_plan_are_timed_together(
    gpu: None,
    capsys: pytest.CaptureFixture[str],
    transport: str,
    kinds: dict[str, tuple[int, int]],
) -> None:
    flags = ("--gpu-exchange", transport, "--decode-backend", "latency_specialized", "--json")
    document = _timed(capsys, *flags)
    assert document["shape"]["rank"] is None
    assert document["shape"]["tensor_parallel_size"] == 2
    assert "the slowest rank's" in document["shape"]["note"]
    (found,) = document["backends"]
    assert found["gpu_exchange"] == transport
    assert [(part["launches"], part["exchanges"]) for part in found["layers"]] == [*kinds.values()]
    # Each thing on a tape takes the second rank, which is the slower one, two microseconds.
    for step in found["steps"]:
        assert step["microseconds"] == 2 * step["launches"]
    assert found["plan_microseconds"] == sum(2 * step["launches"] for step in found["steps"])


@pytest.mark.slow
@pytest.mark.interpreter
def test_both_backends_are_timed_on_all_ranks(
    gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _timed(capsys, "--gpu-exchange", "symmetric")
    assert "kimi-k3, layers 0 to 2, all 2 ranks: a GPU each, random weights" in out
    for backend in ("auto", "latency_specialized"):
        assert f"backend {backend}, 1 row, 9 tokens of context, " in out
    assert out.count(" launches a step, 2 ranks through symmetric; timed as replays of a CUDA") == 2
    assert out.count("exchanges a layer") == 2
    lines = [line.split("  ") for line in out.splitlines() if line.startswith("KDA + MoE")]
    ours = [cell.strip() for cell in lines[-1] if cell.strip()]
    assert ours[:4] == ["KDA + MoE", "1", "10", "4"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("-tp", "4"),
            "each of the 4 ranks on this host needs a GPU of its own, and torch finds 1",
        ),
        (("-tp", "7"), "96 KDA heads cannot be divided among 7 ranks"),
        (("-tp", "4", "--rank-share", "8"), "--tensor-parallel-size is 4 and --rank-share 8; give"),
        (("-tp", "4", "--rank", "1"), "--rank is 1; of --tensor-parallel-size 4 all ranks are"),
        (("--rank-share", "4", "--rank", "4"), "--rank is 4; with 4 ranks it must be from 0 to 3"),
        (("-tp", "4", "--device", "cuda:1"), "each rank has a GPU of its own, the first of a host"),
        (("--gpu-exchange", "nccl"), "gpu_exchange is 'nccl', tensor_parallel_size 1"),
    ],
)
def test_what_cannot_be_timed_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert main([*SHAPE, *more]) in (1, 2)
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


def test_ranks_of_torchrun_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main([*SHAPE, "-tp", "2"]) == 2
    assert "starts the ranks of a host by itself" in capsys.readouterr().err


def test_what_is_of_a_shape_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (("--rank-share", "2"), ("-tp", "2"), ("--gpu-exchange", "nccl")):
        assert main(["bench", "layer", "MODEL", *flag]) == 2
        assert "needs a --shape" in capsys.readouterr().err
