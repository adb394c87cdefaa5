"""One rank's share of Kimi K3 with random weights: the real shapes, on a GPU."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kdecode.bench.device import DeviceReadProbe
from kdecode.cli import main

pytestmark = pytest.mark.gpu

# A dense layer, two mixtures behind KDA and one behind latent attention.
SHAPE = ("--shape", "kimi-k3", "--rank-share", "16", "--layers", "4", "--context-tokens", "300")


def test_memory_is_read_at_a_speed_that_a_gpu_has() -> None:
    probe = DeviceReadProbe("cuda", num_bytes=1 << 30)
    rates = [probe.bytes_per_second() for _ in range(3)]
    assert min(rates) > 100e9
    assert max(rates) < 1.2 * min(rates)


def test_bench_layer_times_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "layer", "--device", "cuda", *SHAPE, "--runs", "3", "--json"])
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["shape"]["tensor_parallel_size"] == 16
    assert "the exchanges between ranks are not in it" in document["shape"]["note"]
    by_name = {entry["backend"]: entry for entry in document["backends"]}
    assert set(by_name) == {"auto", "latency_specialized"}
    ours = by_name["latency_specialized"]
    assert ours["timed_as"] == "timed as replays of a CUDA graph"
    assert [layer["launches"] for layer in ours["layers"]] == [5, 7, 7, 10]
    assert sum(layer["bytes"] for layer in ours["layers"]) == pytest.approx(
        sum(layer["bytes"] for layer in by_name["auto"]["layers"]), rel=0.02
    )
    assert all(math.isfinite(step["microseconds"]) for step in ours["steps"])
    # Nothing reads memory faster than the probe does, by more than the probe varies.
    assert ours["plan_microseconds"] * 1e-6 * ours["bytes_per_second"] > 0.9 * sum(
        step["weight_bytes"] + step["state_bytes"] for step in ours["steps"]
    )
    torch.cuda.empty_cache()
