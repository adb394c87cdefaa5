"""`kdecode bench peers` and `bench layer --shape`, with programs that play llama.cpp."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from kdecode.bench.agreement import NearTie
from kdecode.bench.compiled_arm import CompiledArm
from kdecode.bench.llama_cpp import PeerError
from kdecode.bench.peer_arms import Work, own_settings
from kdecode.cli import main
from kdecode.config import EngineConfig, ModelConfig
from kdecode.engine.engine import LLM
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
    value = lambda flag: words[words.index(flag) + 1]
    prompt, reply = int(value("-p")), int(value("-n"))
    assert value("-t") == "1" and (prompt if not reply else value("-d") == "8")
    print(json.dumps([{{"n_prompt": prompt, "n_gen": reply, "avg_ts": 1e9, "n_ubatch": 512}}]))
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
    lengths = ("--context-tokens", "8", "--output-tokens", "4")
    return [*_any_work(model), *(() if "prompt" in more else lengths), *more]


def _any_work(model: Path, *more: str) -> list[str]:
    common = ("--blocks", "2", "--threads", "1", "--agreement-tokens", "8")
    return ["bench", "peers", str(model), *common, *more]


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
        "rows is 2": _peers(mini_checkpoint, "--measure", "prompt", "--rows", "2"),
        "leave --measure out": _peers(mini_checkpoint, "--measure", "prompt", "--server"),
        "leaves ours alone": _peers(mini_checkpoint, "--peer", "none", "--server"),
        "neither servers nor prompts": _compiled(mini_checkpoint, "--measure", "prompt"),
        "no trunk in int8": _compiled(mini_checkpoint, "--trunk-format", "int8"),
        "needs a C++ compiler": _compiled(mini_checkpoint),
        "no other --peer goes with it": _peers(
            mini_checkpoint, "--peer", "none", "--peer", "llama.cpp"
        ),
        "--prompt-tokens needs --measure prompt": _peers(mini_checkpoint, "--prompt-tokens", "8"),
        "--near-tie-rtol needs --compile-auto": _peers(mini_checkpoint, "--near-tie-rtol", "0.1"),
        "--context-tokens has no part in --measure prompt": _any_work(
            mini_checkpoint, "--measure", "prompt", "--context-tokens", "8"
        ),
        "--output-tokens has no part in --measure prompt": _any_work(
            mini_checkpoint, "--measure", "prompt", "--output-tokens", "8"
        ),
        "near_tie_rtol is inf; it must be": _compiled(mini_checkpoint, "--near-tie-rtol", "inf"),
        "near_tie_rtol is nan; it must be": _compiled(mini_checkpoint, "--near-tie-rtol", "nan"),
        "near_tie_rtol is -1.0; it must be": _compiled(mini_checkpoint, "--near-tie-rtol", "-1"),
        "--device is cuda, and other engines are measured on the CPU": _peers(
            mini_checkpoint, "--device", "cuda"
        ),
        "--device is cuda:0, and other": _peers(
            mini_checkpoint, "--device", "cuda:0", "--server", "--peer", "llama.cpp"
        ),
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


def test_a_report_names_what_ran(
    mini_checkpoint: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.0)
    assert main(_peers(mini_checkpoint, "--decode-backend", "auto", "--page-tokens", "16")) == 0
    out = capsys.readouterr().out
    for text in (
        "1 request at a time, 8 tokens of context, 4 tokens a run",
        "2 blocks of two runs of every arm",
        "1 thread; seed of the intervals 0",
        f"{mini_checkpoint.name}: kimi_k3, 9 layers, weights ",
        "kdecode auto: device cpu, threads 1, isa ",
        "pages of 16, steps of at most 512, prefix caching False",
        "llama.cpp: n_ubatch 512",
        "torch 2.",
    ):
        assert text in out


def test_an_arm_on_a_gpu_names_what_it_was_told(mini_checkpoint: Path) -> None:
    with LLM(mini_checkpoint, num_threads=1, max_requests=1, max_context_tokens=64) as llm:
        config = llm.resolved_config()
    told = {"gpu_kernels": "cute", "shared_experts": "stream", "weight_prefetch": "l2"}
    found = own_settings({**config, "device": "cuda", **told})
    assert found["device"] == "cuda"
    assert {name.replace("_", " "): value for name, value in told.items()}.items() <= found.items()
    assert own_settings(config)["threads"] == 1


@pytest.mark.parametrize("shape", [(), ("--rank-share", "8")])
@pytest.mark.parametrize("backend", [(), ("--decode-backend", "latency_specialized")])
def test_a_shape_without_its_gpu_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[str, ...],
    backend: tuple[str, ...],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    where = ("--device", "cuda", "--shape", "kimi-k3")
    scaled = ("--expert-products", "scaled")
    for part in (("layer", *backend), ("tune",), ("tune", *scaled)):
        assert main(["bench", *part, *where, *shape]) == 2
        out, err = capsys.readouterr()
        assert "finds no CUDA device here" in err
        assert (out, err.count("\n")) == ("", 1)


def test_prompts_of_several_lengths(
    mini_checkpoint: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.0)
    flags = ["--peer", "llama.cpp", "--peer", "llama.cpp-q8_0", "--decode-backend", "auto"]
    flags += ["--measure", "prompt", "--prompt-tokens", "16", "70", "--json"]
    assert main(_peers(mini_checkpoint, *flags)) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["kdecode auto", "llama.cpp", "llama.cpp-q8_0"]
    assert [arm["name"] for arm in found["arms"]] == names
    assert [part["prompt_tokens"] for part in found["lengths"]] == [16, 70]
    for part in found["lengths"]:
        assert len(part["runs"]) == 2 * 2 * len(names)
        ours, *theirs = part["tokens_per_second"]
        assert 0 < ours < 1e6
        assert theirs == [1e9, 1e9]
        released, quantised = part["ratios"]
        assert released["estimate"]["ratio"] < 1e-2
        assert quantised["estimate"] is None


def test_prompts_in_words(
    mini_checkpoint: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_logits(mini_checkpoint, programs, shift=0.0)
    flags = ("--measure", "prompt", "--prompt-tokens", "16", "70", "--decode-backend", "auto")
    assert main(_peers(mini_checkpoint, *flags)) == 0
    out = capsys.readouterr().out
    assert "time until the first token of the reply is known" in out
    assert "70 tokens, tok/s" in out
    assert "16 tokens: kdecode auto / llama.cpp: 0.00x [" in out
    assert " of 8 " in out


def _compiled(model: Path, *more: str) -> list[str]:
    flags = ("--peer", "none", "--decode-backend", "auto", "--compile-auto", "default", *more)
    return _peers(model, *flags)


def _as_it_is(graph: object, **options: object) -> object:
    """For `torch.compile`: the graph as it was recorded. Whether Inductor's is as good, the slow
    tests of `tests/decode/test_compiled.py` say."""
    return graph


def test_a_compiled_forward_is_an_arm_beside_the_one_that_is_not(
    mini_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compile", _as_it_is)
    assert main(_compiled(mini_checkpoint, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["kdecode auto", "kdecode auto, torch.compile default"]
    assert [arm["name"] for arm in found["arms"]] == names
    assert found["left_out"] == []
    # Replies are 4 tokens long, and more is compared.
    drift = found["arms"][1]["settings"]["drift"]
    assert "(up to 0.05 of the largest logit) and no other difference in 16 positions" in drift
    assert found["arms"][0]["compiled"] is None
    compiled = found["arms"][1]["compiled"]
    assert compiled["near_tie"] == {"atol": 0.0, "rtol": 0.05}
    assert (compiled["drift"]["positions"], compiled["drift"]["real"]) == (16, 0)
    (ratio,) = found["ratios"]
    assert (ratio["ours"], ratio["peer"]) == tuple(names)
    assert ratio["estimate"]["ratio"] > 0


def test_a_forward_that_does_not_compile_is_not_timed(
    mini_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: object, **options: object) -> object:
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr("torch.compile", broken)
    assert main(_compiled(mini_checkpoint)) == 0
    out = capsys.readouterr().out
    assert "kdecode auto, torch.compile default: not measured. torch.compile failed with" in out
    assert "RuntimeError: C++ compile error" in out
    assert "auto /" not in out


def test_only_compiled_steps_with_the_same_choices_are_timed(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
        return lambda *inputs: -graph(*inputs)

    llm = LLM(mini_checkpoint, num_threads=1, max_requests=3, max_context_tokens=64)
    near_tie, work = NearTie(0.0, 0.05), Work(3, 8, 4, 1)
    monkeypatch.setattr("torch.compile", wrong)
    # The first token of each reply comes from its prompt, and is not compared.
    with pytest.raises(PeerError, match="18 of 18 choices are not those of the same forward"):
        CompiledArm(llm, "default", near_tie, work)
    llm = LLM(mini_checkpoint, num_threads=1, max_requests=3, max_context_tokens=64)
    monkeypatch.setattr("torch.compile", _as_it_is)
    arm = CompiledArm(llm, "default", near_tie, work)
    assert (arm.drift.positions, arm.drift.real) == (18, 0)
    assert arm.decoded().tokens == 9
    # Steps of two rows are not those that were compiled.
    monkeypatch.setattr(arm, "_work", Work(2, 8, 4, 1))
    with pytest.raises(PeerError, match="6 tokens were timed, and 0 steps of 2 rows ran compiled"):
        arm.decoded()


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
            router = next(step for step in cost.steps if "route" in step.covers)
            own = config.moe.num_experts // num_ranks
            if "latent_down" in router.covers:
                own += (config.moe.latent_width or 0) // num_ranks
            assert router.weight_bytes == 2 * own * config.hidden_size
