"""Standard steps of two ranks as CUDA graphs, a GPU each, and what `bench layer` times on both."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_faults import follow_until_recorded
from ranked_engines import MAX_DISTANCE, PROMPTS, Single, build, distance, greedy, with_draft

from kdecode.cli import main
from kdecode.parallel.ranks import RankError

pytestmark = pytest.mark.gpu(2)

TRANSPORTS = ("nccl", "symmetric")
LIMIT_S = 60.0
WORDS = {"kill": "died with signal 9", "stop": "is stopped and has given no sign of life for"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("has_draft", [False, True])
def test_steps_of_ranks_are_replayed(
    mini_16_checkpoint: Path, transport: str, has_draft: bool
) -> None:
    """Prompts come between, and requests end before others. With a draft rank 0 records parts of a
    step and the other whole ones."""
    single = Single.of(mini_16_checkpoint, "auto")
    settings: dict[str, Any] = {"device": "cuda", "gpu_exchange": transport}
    if has_draft:
        settings["speculative"] = with_draft(mini_16_checkpoint)
    with build(mini_16_checkpoint, "auto", 2, **settings) as llm:
        logits = [llm.teacher_forced(*p) for p in zip(PROMPTS, single.replies, strict=True)]
        steps = llm.stats()["recorded_steps"]
        assert steps > 0
        if not has_draft:
            # The first of each reply comes from its prompt.
            assert steps == sum(len(reply) - 1 for reply in single.replies)
            outputs = llm.generate(PROMPTS, greedy())
            assert single.near_ties(outputs) <= len(PROMPTS)
            assert llm.stats()["recorded_steps"] > steps
        begin = time.monotonic()
    # Connections do not wait for graphs.
    assert time.monotonic() - begin < LIMIT_S
    for ours, theirs in zip(logits, single.logits, strict=True):
        assert distance(ours.cpu(), theirs) < MAX_DISTANCE


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", WORDS)
def test_a_rank_that_is_lost_while_all_record_is_named(
    monkeypatch: pytest.MonkeyPatch, mini_16_checkpoint: Path, transport: str, kind: str
) -> None:
    follow = partial(follow_until_recorded, kind)
    monkeypatch.setattr("kdecode.engine.leader.follow", follow)
    begin = time.monotonic()
    with pytest.raises(RankError, match=rf"Rank 1 of 2 \(process \d+\) {WORDS[kind]}"):
        build(mini_16_checkpoint, "auto", 2, device="cuda", gpu_exchange=transport)
    assert time.monotonic() - begin < 5 * LIMIT_S


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bench_layer_times_both_backends_on_both_ranks(
    capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    shape = ("--shape", "kimi-linear-48b", "--layers", "4", "--context-tokens", "300")
    ranks = ("-tp", "2", "--gpu-exchange", transport, "--runs", "3", "--json")
    assert main(["bench", "layer", "--device", "cuda", *shape, *ranks]) == 0
    document = json.loads(capsys.readouterr().out)
    by_name = {entry["backend"]: entry for entry in document["backends"]}
    assert set(by_name) == {"auto", "latency_specialized"}
    for entry in by_name.values():
        assert entry["gpu_exchange"] == transport
        assert entry["timed_as"] == "timed as replays of a CUDA graph"
        assert all(math.isfinite(step["microseconds"]) for step in entry["steps"])
        assert all(layer["exchanges"] >= 2 for layer in entry["layers"])
        # Nothing reads memory faster than the probe does, by more than the probe varies.
        moved = sum(step["weight_bytes"] + step["state_bytes"] for step in entry["steps"])
        assert entry["plan_microseconds"] * 1e-6 * entry["bytes_per_second"] > 0.9 * moved
    ours, standard = (
        sum(layer["launches"] for layer in by_name[name]["layers"])
        for name in ("latency_specialized", "auto")
    )
    assert ours < standard
