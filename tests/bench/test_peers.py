"""Peers: the protocol on made-up arms, and llama.cpp's outputs as its programs print them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdecode.bench.llama_cpp import (
    PROGRAMS,
    LlamaCpp,
    LlamaSpeed,
    PeerError,
    batched_speed,
    bench_speed,
    read_logits,
)
from kdecode.bench.load import LoadMeter
from kdecode.bench.peer_arms import TRUNK, ggml_precision
from kdecode.bench.peers import (
    MAX_DIVERGENCE,
    Divergence,
    PeerRun,
    divergence,
    measure_peers,
    peer_ratio,
    refusal,
    typical_speed,
    used_pairs,
)


@dataclass
class Made:
    """An arm that says the same speed at every run and writes down that it ran."""

    name: str
    speed: float
    log: list[str]
    keeps_weights: bool = True
    version: str = "1"
    precision: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def tokens_per_second(self) -> float:
        self.log.append(self.name)
        return self.speed


class Loads(LoadMeter):
    def stop(self) -> float | None:
        return 0.0


def test_arms_take_turns_in_both_directions_after_a_run_that_does_not_count() -> None:
    log: list[str] = []
    arms = [Made(name, speed, log) for name, speed in (("a", 30.0), ("b", 20.0), ("c", 10.0))]
    runs = measure_peers(arms, 2, meter=Loads())
    assert "".join(log) == "abc" + "abccba" * 2
    assert [run.arm for run in runs] == [0, 1, 2, 2, 1, 0] * 2
    assert [typical_speed(runs, arm) for arm in range(3)] == [30.0, 20.0, 10.0]
    found = peer_ratio(runs, 0, 2, seed=0)
    assert (found.ratio, found.num_blocks, found.num_pairs) == (pytest.approx(3.0), 2, 4)
    assert peer_ratio(runs, 1, 0, seed=0).ratio == pytest.approx(2 / 3)


def test_spoilt_pairs_do_not_count_while_two_blocks_have_others() -> None:
    def block(number: int, ours: float, peer: float, others: float) -> list[PeerRun]:
        return [PeerRun(number, 0, ours, others), PeerRun(number, 1, peer, 0.0)]

    clean = block(0, 20.0, 10.0, 0.0) + block(1, 20.0, 10.0, 0.0)
    spoilt = block(2, 5.0, 10.0, 0.9)
    assert not used_pairs(clean + spoilt, 0, 1)[1]
    found = peer_ratio(clean + spoilt, 0, 1, seed=0)
    assert (found.ratio, found.num_pairs) == (pytest.approx(2.0), 2)
    assert typical_speed(clean + spoilt, 0) == 20.0
    # One clean block has no interval: then all count.
    assert used_pairs(clean[:2] + spoilt, 0, 1)[1]
    found = peer_ratio(clean[:2] + spoilt, 0, 1, seed=0)
    assert (found.ratio, found.num_pairs) == (pytest.approx(1.0), 2)


def test_divergence_is_of_distributions_not_of_logits() -> None:
    even, skewed = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    found = divergence(even, skewed + 7.0)
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.mean == found.largest == pytest.approx(wanted)
    assert not found.agrees
    same = divergence(skewed - 3.0, skewed)
    assert (same.positions, same.same_choice) == (1, 1)
    assert abs(same.mean) < 1e-12
    assert same.agrees


def test_what_is_below_the_floor_is_no_difference() -> None:
    # As a file of logits that stops 2 nats below the largest has it: most tokens at the floor.
    full = np.array([[0.0, -1.0, *[-30.0] * 100]])
    cut = np.maximum(full, -2.0)
    assert not divergence(full, cut).agrees
    assert divergence(full, cut, floor_nats=2.0).mean == pytest.approx(0.0, abs=1e-12)
    # A difference above the floor is still one.
    other = np.array([[0.0, -1.5, *[-2.0] * 100]])
    assert not divergence(full, other, floor_nats=2.0).agrees


def test_a_ratio_needs_equal_promises_and_checked_logits() -> None:
    ours, theirs = Made("ours", 1, []), Made("theirs", 1, [])
    changed = Made("theirs-q8_0", 1, [], keeps_weights=False)
    good = Divergence(8, MAX_DIVERGENCE / 2, 1.0, 8)
    bad = Divergence(8, MAX_DIVERGENCE * 2, 1.0, 8)
    assert refusal(ours, theirs, good, needs_check=True) is None
    assert "theirs-q8_0 differ" in str(refusal(ours, changed, good, needs_check=True))
    assert "not checked" in str(refusal(ours, theirs, None, needs_check=True))
    assert "2.00e-04 nats" in str(refusal(ours, theirs, bad, needs_check=True))
    # A peer that reads the checkpoint itself has nothing of ours to get wrong.
    assert refusal(ours, theirs, None, needs_check=False) is None


def test_speeds_are_read_from_what_the_programs_print() -> None:
    prompt = {"n_prompt": 512, "n_gen": 0, "avg_ts": 900.0, "n_ubatch": 512, "model_size": 1}
    decode = {"n_prompt": 0, "n_gen": 32, "avg_ts": 25.5, "type_k": "f16"}
    printed = json.dumps([prompt, decode])
    assert bench_speed(printed) == LlamaSpeed(25.5, {"type_k": "f16"})
    assert bench_speed(printed, is_prompt=True) == LlamaSpeed(900.0, {"n_ubatch": 512})
    printed = 'main: n_kv_max = 9\n{"pp": 8, "n_batch": 2048, "speed_tg": 80.5}\n'
    assert batched_speed(printed) == LlamaSpeed(80.5, {"n_batch": 2048})
    for read in (bench_speed, partial(bench_speed, is_prompt=True), batched_speed):
        with pytest.raises(PeerError, match="printed no speed"):
            read("error: no such model")


def logits_file(tokens: list[int], lines: np.ndarray) -> bytes:
    """As `llama-perplexity --save-all-logits` writes log-probabilities of one chunk."""
    vocab = lines.shape[1]
    head = b"_logits_" + np.array([len(tokens), vocab, 1], np.int32).tobytes()
    data = head + np.array(tokens, np.int32).tobytes()
    for line in lines:
        scale = (line.max() - line.min()) / 65535 or 1.0
        data += np.array([scale, line.min()], np.float32).tobytes()
        values = np.zeros(2 * ((vocab + 1) // 2), np.uint16)
        values[:vocab] = np.rint((line - line.min()) / scale)
        data += values.tobytes()
    return data


def test_saved_logits_are_read_back() -> None:
    lines = np.log(np.random.default_rng(0).dirichlet(np.ones(7), size=3))
    tokens, found = read_logits(logits_file([5, 6, 7, 8, 9, 10, 11, 12], lines))
    assert tokens == [5, 6, 7, 8, 9, 10, 11, 12]
    # 16 bits between the lowest and the highest.
    spread = lines.max(-1, keepdims=True) - lines.min(-1, keepdims=True)
    assert (np.abs(found - lines) <= 0.51 * spread / 65535 + 1e-5).all()
    with pytest.raises(PeerError, match="no file of logits"):
        read_logits(b"GGUF" + bytes(40))


def test_programs_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROGRAMS[:-1]:
        (tmp_path / name).write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerError, match="PATH: llama-perplexity not found"):
        LlamaCpp.find()
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (tmp_path / PROGRAMS[-1]).write_text("#!/bin/sh\necho 'version: 11434 (abc)' >&2\n")
    (tmp_path / PROGRAMS[-1]).chmod(0o755)
    llama = LlamaCpp.find()
    assert llama.version() == "llama.cpp 11434 (abc)"
    with pytest.raises(PeerError, match="llama-bench ended with 3"):
        llama.decode_speed(Path("m.gguf"), 1, 1, 8, 8)


def test_a_batched_run_that_lost_its_output_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prints at its third run.
    script = """#!/bin/sh
echo >> {0}/runs
[ $(wc -l < {0}/runs) -lt 3 ] || echo '{{"n_batch": 2048, "speed_tg": 80.5}}'
"""
    for name in PROGRAMS:
        (tmp_path / name).write_text(script.format(tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    speed = LlamaCpp.find().decode_speed(Path("m.gguf"), 1, 2, 8, 8)
    assert speed == LlamaSpeed(80.5, {"n_batch": 2048})
    assert (tmp_path / "runs").read_text() == "\n" * 3


def test_precision_of_every_class_of_a_file() -> None:
    types = {
        "token_embd.weight": ("Q8_0", 1),
        "output.weight": ("Q6_K", 1),
        "output_norm.weight": ("F32", 1),
        "blk.0.attn_output.weight": ("Q8_0", 1),
        "blk.0.ffn_gate.weight": ("BF16", 1),
        "blk.1.ffn_gate_inp.weight": ("F32", 1),
        "blk.1.ffn_gate_exps.weight": ("MXFP4", 1),
        "blk.1.ssm_a": ("F32", 1),
    }
    found = ggml_precision(types)
    assert found["output matrix"] == "Q6_K x int8"
    assert found[TRUNK] == "BF16 x bf16, Q8_0 x int8"
    assert found["routed experts"] == "MXFP4 x int8"
    assert found["router"] == "F32 x fp32"
    assert found["norms, convolutions, biases"] == "F32"
