"""`kdecode bench peers` and `bench layer --shape`, with programs that play llama.cpp."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kdecode.cli import main
from kdecode.config import EngineConfig, ModelConfig
from kdecode.engine.shape_probe import inspect_shape
from kdecode.model.presets import PRESETS, released_config

# Plays every program: `llama-bench` is fast, `llama-perplexity` says what it was made to say.
PLAYER = """#!{python}
import json, struct, sys
from pathlib import Path
name, words = Path(sys.argv[0]).name, sys.argv[1:]
if "--version" in words:
    print("version: 1 (fake)")
elif name == "llama-bench":
    assert words[words.index("-d") + 1] == "8" and words[words.index("-t") + 1] == "1"
    print(json.dumps([{{"n_gen": 4, "avg_ts": 1e9}}]))
elif name == "llama-perplexity":
    Path(words[words.index("--save-all-logits") + 1]).write_bytes(
        Path({logits!r}).read_bytes())
elif name == "llama-quantize":
    Path(words[-2]).write_bytes(Path(words[-3]).read_bytes())
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with players; returns the file of logits that they give."""
    folder, logits = tmp_path / "bin", tmp_path / "logits"
    folder.mkdir()
    for name in ("bench", "batched-bench", "quantize", "perplexity"):
        player = folder / f"llama-{name}"
        player.write_text(PLAYER.format(python=sys.executable, logits=str(logits)))
        player.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return logits


def _peers(model: Path, *more: str) -> list[str]:
    common = ["--context-tokens", "8", "--output-tokens", "4", "--blocks", "2", "--threads", "1"]
    return ["bench", "peers", str(model), *common, "--agreement-tokens", "8", *more]


def _write_logits(model: Path, target: Path, *, shift: float) -> None:
    """The reference's own log-probabilities; ``shift`` is added to those of half of the tokens."""
    import numpy as np
    import torch
    from test_peers import logits_file

    from kdecode.model.reference import GOLD32, RequestState, forward
    from kdecode.model.weights import CheckpointReader

    reader = CheckpointReader(model)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        state = RequestState.new(reader.config, GOLD32)
        logits = forward(reader.load_model(), reader.config, torch.tensor(ids), state, GOLD32)
    lines = torch.log_softmax(logits.double(), -1).numpy()[4:-1].copy()
    lines[:, ::2] += shift
    assert isinstance(lines, np.ndarray)
    target.write_bytes(logits_file(ids, lines))


def test_a_peer_whose_logits_agree_gets_a_ratio(
    mini_checkpoint: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.0)
    peers = ("--peer", "llama.cpp", "--peer", "llama.cpp-q8_0")
    arms = ("--decode-backend", "latency_specialized")
    assert main(_peers(mini_checkpoint, *peers, *arms, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"]["mean"] < 1e-6
    assert [arm["name"] for arm in found["arms"]] == [
        "kdecode latency_specialized",
        "llama.cpp",
        "llama.cpp-q8_0",
    ]
    # Rounding to bf16 is further from the reference than the reference is from itself.
    assert found["arms"][0]["divergence"]["mean"] > found["arms"][1]["divergence"]["mean"]
    released, quantised = found["ratios"]
    assert released["estimate"]["ratio"] < 1e-3
    assert released["refusal"] is None
    assert quantised["estimate"] is None
    assert "weights of llama.cpp-q8_0 differ" in quantised["refusal"]


def test_a_peer_whose_logits_differ_gets_none(
    mini_checkpoint: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.5)
    arms = ("--decode-backend", "auto")
    assert main(_peers(mini_checkpoint, *arms)) == 0
    out = capsys.readouterr().out
    assert "kdecode auto / llama.cpp: no ratio, its logits are" in out
    assert "MXFP4 x int8" in out


def test_what_is_not_there_ends_in_one_line(
    mini_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cases = {
        "llama.cpp is not on the PATH": _peers(mini_checkpoint),
        "no class for a kimi_k3 model": _peers(mini_checkpoint, "--peer", "transformers"),
        "blocks is 1": [*_peers(mini_checkpoint), "--blocks", "1"],
        "--rank needs a --shape": ["bench", "layer", "--rank", "1"],
        "--drafts needs a MODEL": ["bench", "layer", "--shape", "kimi-k3", "--drafts", "3"],
        "one of them is timed": ["bench", "layer", str(mini_checkpoint), "--shape", "kimi-k3"],
        "rank is 16": [
            *("bench", "layer", "--shape", "kimi-k3"),
            *("--tensor-parallel-size", "16", "--rank", "16"),
        ],
    }
    for message, arguments in cases.items():
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("preset", "num_ranks"), [("mini", 1), ("mini-16", 8)])
def test_a_shape_is_timed_on_both_backends(preset: str, num_ranks: int) -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS[preset]))
    for backend in ("auto", "latency_specialized"):
        engine = EngineConfig(
            decode_backend=backend, num_threads=1, max_context_tokens=8, max_requests=2
        )
        cost = inspect_shape(config, engine, 2, 1, 0, lambda done, of: None, num_ranks)
        assert (cost.backend, cost.rows) == (backend, 2)
        assert cost.plan_microseconds > 0
        assert {step.layer for step in cost.steps} == {None, *range(config.num_layers)}
        experts = [s.distinct_experts for s in cost.steps if s.distinct_experts is not None]
        assert len(experts) == config.num_layers - 1
        assert all(4 <= count <= 8 for count in experts)
        if backend == "auto":
            router = next(step for step in cost.steps if step.covers == ("route",))
            own = config.moe.num_experts // num_ranks
            assert router.weight_bytes == 2 * own * config.hidden_size
