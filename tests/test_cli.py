"""The command line, through `main`: what is printed where, exit codes, bad input."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdecode.cli import build_parser, main
from kdecode.config_draft import DraftKind
from kdecode.model.draft_synthesis import make_draft

ENGINE = ["--threads", "1", "--page-tokens", "16"]
SPECIALIZED = ("--decode-backend", "latency_specialized")


def _run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_streams_text_and_ends_with_metrics(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    args = ["generate", mini_checkpoint, "--prompt", "the cat", "--max-tokens", 5, "--ignore-eos"]
    code, out, err = _run(capsys, *args, *ENGINE)
    assert code == 0
    document_code, document, _ = _run(capsys, *args, "--json", *ENGINE)
    assert document_code == 0
    reply = json.loads(document)
    assert out == reply["text"] + "\n"
    assert len(reply["token_ids"]) == reply["metrics"]["output_tokens"] == 5
    assert reply["config"]["decode_backend"] == "auto"
    assert "5 output tokens, finish length" in err
    assert "0 % specialized" in err


def test_generate_tells_what_loading_took(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    args = ("generate", mini_checkpoint, "--prompt", "a", "--max-tokens", 2, "--json")
    _, out, err = _run(capsys, *args, *ENGINE)
    load = json.loads(out)["load"]
    assert set(load) == {"open_s", "pack_s", "prepare_s"}
    assert all(seconds > 0 for seconds in load.values())
    assert f"auto: opened the checkpoint in {load['open_s']:.2f} s, read and packed" in err
    assert f"MiB in {load['pack_s']:.2f} s" in err


def test_generate_specialized_reports_its_coverage(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat", encoding="utf-8")
    code, out, _ = _run(
        capsys,
        *("generate", mini_checkpoint, "--prompt-file", prompt, "--max-tokens", 4),
        *("--ignore-eos", "--decode-backend", "latency_specialized", "--json", *ENGINE),
    )
    assert code == 0
    metrics = json.loads(out)["metrics"]
    assert (metrics["coverage"], metrics["decode_steps"]) == (1.0, {"specialized": 3})


def test_generate_chat_keeps_reasoning_off_stdout(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    code, out, err = _run(
        capsys,
        *("generate", mini_checkpoint, "--prompt", "hi", "--chat", "--max-tokens", 4, *ENGINE),
    )
    assert code == 0
    # The reply of four tokens never leaves the channel that the prompt opened.
    assert out == "\n"
    assert "output tokens" in err


def test_generate_chat_streams_the_reply(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    args = ("generate", mini_checkpoint, "--prompt", "hi", "--chat", "--max-tokens", 6)
    args = (*args, "--no-thinking")
    code, out, _ = _run(capsys, *args, *ENGINE)
    _, document, _ = _run(capsys, *args, "--json", *ENGINE)
    response = json.loads(document)["response"]
    assert response
    assert (code, out) == (0, response + "\n")


@pytest.mark.parametrize("checkpoint", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_generate_chat_does_not_show_a_stop_string(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, checkpoint: str
) -> None:
    args = ("generate", request.getfixturevalue(checkpoint), "--prompt", "hi", "--chat")
    args = (*args, "--no-thinking", "--max-tokens", 8, "--ignore-eos")
    whole = json.loads(_run(capsys, *args, "--json", *ENGINE)[1])["response"]
    stop = whole[len(whole) // 2 :][:2]
    expected = whole[: whole.index(stop)]
    code, out, _ = _run(capsys, *args, "--stop", stop, *ENGINE)
    assert (code, out) == (0, expected + "\n")
    document = json.loads(_run(capsys, *args, "--stop", stop, "--json", *ENGINE)[1])
    assert document["text"] == document["response"] == expected
    assert document["finish_reason"] == "stop"


def test_the_default_model_and_its_draft_are_used_when_none_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafts = ("--speculative-config", '{"num_speculative_tokens": 3}')
    command = ("generate", "--prompt", "def f(x):", "--max-tokens", 24, "--json", *ENGINE)
    code, out, err = _run(capsys, *command, *drafts)
    assert code == 0
    assert "using the default model in" in err
    document = json.loads(out)
    assert document["metrics"]["speculation"]["rounds"] > 0
    assert json.loads(_run(capsys, *command)[1])["text"] == document["text"]


def test_a_directory_in_place_of_a_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").mkdir()
    code, _, err = _run(capsys, "generate", tmp_path, "--prompt", "x")
    assert code == 2
    assert str(tmp_path / "config.json") in err


def test_one_of_a_thing_is_written_as_one(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    plan = ("plan", mini_checkpoint, "--context-tokens", 1, *ENGINE)
    check = ("check", mini_checkpoint, "--layers", 1, "--decode-backend", "auto", *ENGINE)
    generate = ("generate", mini_checkpoint, "--prompt", "a", "--max-tokens", 1, *ENGINE)
    compare = ("compare", mini_checkpoint, "--prompts", 1, "--prompt-tokens", 1, "--blocks", 2)
    layer = ("bench", "layer", mini_checkpoint, "--context-tokens", 1, "--runs", 1, *ENGINE)
    for command in (plan, check, generate, layer, (*compare, "--output-tokens", 2, *ENGINE)):
        _, out, err = _run(capsys, *command)
        assert re.findall(r"(?<![\d.,])1 (?!ms\b)\w+s\b", out + err) == []


def test_plan_lists_steps_and_bytes(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    args = ("plan", mini_checkpoint, "--decode-backend", "latency_specialized", *ENGINE)
    code, out, _ = _run(capsys, *args, "--rows", 2)
    assert code == 0
    assert "backend latency_specialized, 2 rows" in out
    assert "of weights" in out
    code, out, _ = _run(capsys, *args, "--rows", 9, "--json")
    document = json.loads(out)
    assert (code, document["backend"]) == (0, "auto")
    assert document["requested_backend"] == "latency_specialized"
    assert document["weight_bytes"] == sum(step["weight_bytes"] for step in document["steps"])


def test_bench_prints_a_floor_and_shares_of_it(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    code, out, _ = _run(capsys, "bench", "roofline", "--threads", 1, "--rounds", 2, "--json")
    (entry,) = json.loads(out)["bandwidth"]
    assert (code, entry["num_threads"], len(entry["readings"])) == (0, 1, 2)
    common = (mini_checkpoint, "--rows", 2, "--context-tokens", 16, "--runs", 1)
    for backend in ("auto", "latency_specialized"):
        engine = ("--decode-backend", backend, *ENGINE)
        decode = ("bench", "decode", *common, "--output-tokens", 4, *engine)
        code, out, _ = _run(capsys, *decode, "--json")
        document = json.loads(out)
        (measured,) = document["runs"]
        assert (code, document["backend"]) == (0, backend)
        assert document["step_bytes"] > document["weight_bytes"] > 0
        assert 0 < measured["floor_share"] < 1
        code, out, _ = _run(capsys, "bench", "layer", *common, *engine)
        assert code == 0
        assert f"backend {backend}, 2 rows, 16 tokens of context" in out
        code, out, _ = _run(capsys, "bench", "layer", *common, "--drafts", 3, *engine)
        assert code == 0
        assert f"backend {backend}, 8 rows, 4 a request, 16 tokens of context" in out
        assert "then the KDA slots past all 4 rows of a request:" in out.splitlines()[-1]
        code, out, _ = _run(capsys, "bench", "layer", *common, *engine)
        assert "launches a layer" in out
        assert "KDA + MoE" in out


def test_plan_of_a_configuration_needs_no_weights(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_bytes((mini_checkpoint / "config.json").read_bytes())
    args = ("--decode-backend", "latency_specialized", "--isa", "portable", "--rows", 2, *ENGINE)
    code, out, _ = _run(capsys, "plan", "--config", config, *args)
    assert (code, out) == _run(capsys, "plan", mini_checkpoint, *args)[:2]
    code, out, _ = _run(capsys, "plan", "--config", config, *args, "--device", "cuda")
    assert code == 0
    assert " steps in one CUDA graph\n" in out
    arch = ("--device", "cuda", "--arch", "sm_80")
    code, out, _ = _run(capsys, "plan", "--config", config, *args, *arch)
    assert code == 1
    assert "The Triton kernels are made for sm_90 (Hopper) and later; cuda is sm_80." in out


@pytest.mark.parametrize(
    "settings",
    [
        ("--tensor-parallel-size", 2, "--gpu-exchange", "nccl"),
        ("--tensor-parallel-size", 2, "--gpu-exchange", "symmetric"),
        ("--gpu-kernels", "cute"),
        (*SPECIALIZED, "--gpu-kernels", "cute", "--rows", 100),
        (*SPECIALIZED, "--shared-experts", "stream", "--rows", 100),
        (*SPECIALIZED, "--weight-prefetch", "l2", "--rows", 12),
    ],
)
def test_what_a_gpu_alone_has_does_not_refuse_the_standard_plan(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, settings: tuple[object, ...]
) -> None:
    config = ("--config", mini_checkpoint / "config.json", "--device", "cuda")
    code, out, err = _run(capsys, "plan", *config, *settings)
    assert (code, err) == (0, "")
    assert out.startswith("backend auto")


@pytest.mark.parametrize("part", ["decode", "contention"])
def test_replies_too_short_to_decode_together_are_named(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, part: str
) -> None:
    """Eight prompts of 128 tokens are prefilled in two steps; one decodes before the last is in."""
    size = ("--rows", 8, "--context-tokens", 128, "--output-tokens", 2)
    code, out, err = _run(capsys, "bench", part, mini_checkpoint, *size, "--threads", 1)
    assert (code, out) == (2, "")
    assert "No step had all 8 requests decoding" in err
    assert "output-tokens is 2" in err


OWN_REASON = "The kernels do not take this model."


def _refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """latency_specialized has a reason of its own: the small models give it none."""
    refuse = "kdecode.decode.latency_specialized.refuse"
    monkeypatch.setattr(refuse, lambda deployment, rows_per_request=1: [OWN_REASON])


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["plan", "MODEL", "--decode-backend", "BACKEND"], 1),
        (["generate", "MODEL", "--prompt", "x", "--decode-backend", "BACKEND"], 2),
        (["compare", "MODEL", "--arm-b", "BACKEND"], 2),
        (["serve", "MODEL", "--decode-backend", "BACKEND"], 2),
        (["check", "MODEL", "--decode-backend", "BACKEND"], 2),
        (["bench", "decode", "MODEL", "--decode-backend", "BACKEND"], 2),
    ],
)
def test_every_reason_of_a_refusal_is_named_by_every_command(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    code: int,
) -> None:
    from kdecode.engine import worker

    # Nothing is packed for an engine that cannot be.
    monkeypatch.setattr(worker, "pack_model", None)
    _refuse(monkeypatch)
    names = ("--kv-cache-dtype", "--block-size")
    if command[0] != "serve":
        names = ("--cache-dtype", "--page-tokens")
    settings = ("--device", "cuda:99", "--threads", 9999, names[0], "fp8", names[1], 7)
    shared = ("device is 'cuda:99'", "num_threads is 9999", "cache_scale is not set")
    if command[0] == "serve":
        settings = (*settings, "--max-num-batched-tokens", 1)
        shared = (*shared, "max_step_tokens is 1")
    for backend, own in (("latency_specialized", [OWN_REASON]), ("auto", [])):
        places = {"MODEL": str(mini_checkpoint), "BACKEND": backend}
        args = [places.get(arg, arg) for arg in command]
        found, out, err = _run(capsys, *args, *settings)
        # `plan` prints what a backend refuses, because that is what it was asked for.
        assert found == (code if own else 2)
        text = out + err
        assert [reason for reason in (*shared, *own) if text.count(reason) != 1] == []


def test_plan_of_a_verify_step(capsys: pytest.CaptureFixture[str], mini_checkpoint: Path) -> None:
    args = ("--decode-backend", "latency_specialized", "--drafts", 3, "--rows", 2, *ENGINE)
    code, out, _ = _run(capsys, "plan", mini_checkpoint, *args)
    assert code == 0
    assert out.startswith("backend latency_specialized, 8 rows, 4 a request\n")
    assert "kda_commit of 6 layers moves them past the rows that stay" in out
    code, out, _ = _run(capsys, "plan", mini_checkpoint, *args, "--json")
    document = json.loads(out)
    assert (code, document["rows"], document["rows_per_request"]) == (0, 8, 4)


def test_bench_layer_with_a_draft(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    args = ("bench", "layer", mini_checkpoint, "--context-tokens", 16, "--runs", 1, *ENGINE)
    for kind, backend in (("lightseek", "latency_specialized"), ("radixark", "auto")):
        make_draft(tmp_path / kind, "mini", kind, seed=0)
        text = json.dumps({"model": str(tmp_path / kind), "num_speculative_tokens": 3})
        own = (*args, "--decode-backend", backend, "--speculative-config", text)
        code, out, _ = _run(capsys, *own)
        assert code == 0
        assert f"backend {backend}, 4 rows, 4 a request, 16 tokens of context" in out
        block, markov, append = out.splitlines()[-3:]
        assert block.startswith("the block: ")
        assert markov.startswith("3 Markov products with the choice of a draft: ")
        assert append.startswith("caching 4 committed tokens: ")
        code, out_json, _ = _run(capsys, *own, "--json")
        draft = json.loads(out_json)["draft"]
        for part in ("block", "append"):
            assert draft[f"{part}_microseconds"] > 0
            assert draft[f"{part}_bytes"] > 0
        assert draft["markov_bytes"] > 0
        if backend == "auto":
            assert "\nthe draft in torch: 3 drafts, 16 tokens of context; timed as it is" in out
            assert draft["plan"] is None
            continue
        assert "the draft: backend latency_specialized, 3 rows, 3 a request" in out
        assert all(step["microseconds"] > 0 for step in draft["plan"]["steps"])


def test_plan_with_a_draft(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    args = ("plan", mini_checkpoint, "--decode-backend", "latency_specialized", *ENGINE)
    for kind, last in (
        ("inferact", "committed tokens: draft_context and draft_insert of 2 layers in one native"),
        ("radixark", "the draft runs in torch: A draft's plan on a CPU has latent attention; this"),
    ):
        make_draft(tmp_path / kind, "mini", kind, seed=0)
        text = json.dumps({"model": str(tmp_path / kind), "num_speculative_tokens": 7})
        code, out, _ = _run(capsys, *args, "--speculative-config", text)
        assert code == 0
        assert out.startswith("backend latency_specialized, 8 rows, 8 a request\n")
        assert out.splitlines()[-1].startswith(last)
    code, _, error = _run(capsys, *args, "--speculative-config", text, "--drafts", 3)
    assert code == 2
    assert "Give --drafts or --speculative-config" in error


def test_a_refusal_in_json_is_a_list(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse(monkeypatch)
    args = ("plan", mini_checkpoint, "--decode-backend", "latency_specialized", "--json")
    code, out, _ = _run(capsys, *args, "--device", "cuda:99", "--cache-dtype", "fp8", *ENGINE)
    reasons = json.loads(out)["refusals"]
    assert code == 1
    for part, reason in zip((OWN_REASON, "cuda:99", "k_scale"), reasons, strict=True):
        assert part in reason


@pytest.mark.parametrize("checkpoint", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_check_passes_on_both_backends(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, checkpoint: str
) -> None:
    directory = request.getfixturevalue(checkpoint)
    code, out, _ = _run(
        capsys, "check", directory, "--steps", 8, "--prompt-tokens", 9, "--json", *ENGINE
    )
    backends = {check["backend"]: check for check in json.loads(out)}
    outside = [
        step
        for check in backends.values()
        for step in (*check["steps"], *check["model"])
        if not step["is_within"]
    ]
    assert outside == []
    assert code == 0
    assert set(backends) == {"auto", "latency_specialized"}
    assert all(check["steps"] and check["model"] for check in backends.values())


def test_check_finds_a_wrong_weight(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kdecode.engine import worker

    pack = worker.pack_model

    def packs_wrong(*args: object) -> object:
        packed = pack(*args)  # type: ignore[arg-type]
        packed.layers[2].post_norm.mul_(1.05)
        return packed

    monkeypatch.setattr(worker, "pack_model", packs_wrong)
    code, out, _ = _run(capsys, "check", mini_checkpoint, "--layers", 3, *ENGINE)
    assert code == 1
    lines = [line for line in out.splitlines() if line.endswith("OUTSIDE")]
    assert any("mlp_in" in line and " 2 " in line for line in lines)
    assert "the first 3 layers only" in out


def test_compare_reports_both_arms(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "comparison.json"
    code, out, err = _run(
        capsys,
        *("compare", mini_checkpoint, "--prompts", 1, "--prompt-tokens", 5, "--blocks", 2),
        *("--output-tokens", 4, "--arm-b", "auto", "--json", path, *ENGINE),
    )
    document = json.loads(path.read_text(encoding="utf-8"))
    # No terminal: a line a phase, and what loading took.
    phases = ["warm-up auto (a)", "warm-up auto (b)", "block 1 of 2", "block 2 of 2", "agreement"]
    assert [line for line in err.splitlines() if line in phases] == phases
    assert err.count("auto: opened the checkpoint in ") == 2
    assert "\r" not in err
    assert code == document["exit_code"] == 0
    assert document["arm_names"] == ["auto (a)", "auto (b)"]
    assert len(document["engines"]) == 2
    assert "packed weights" in out
    assert "verdict" in out


@pytest.mark.parametrize("place", ["missing/out.json", "folder", "file/out.json", "n" * 300])
def test_an_output_file_that_cannot_be_written_is_found_before_the_run(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    tmp_path: Path,
    place: str,
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    code, out, err = _run(capsys, "compare", mini_checkpoint, "--json", tmp_path / place, *ENGINE)
    assert (code, out) == (2, "")
    assert f"{tmp_path / place} cannot be written" in err.splitlines()[-1]


@pytest.mark.parametrize("content", [None, "old"])
def test_a_comparison_that_fails_leaves_its_output_file_alone(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "out.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    args = ("compare", mini_checkpoint, "--json", path, "--device", "cuda:99", *ENGINE)
    assert _run(capsys, *args)[0] == 2
    assert list(tmp_path.iterdir()) == ([] if content is None else [path])
    assert content is None or path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("where", [(), ("--serve",)])
@pytest.mark.parametrize(
    "setting",
    [("--shared-experts", "stream"), ("--weight-prefetch", "l2"), ("--expert-products", "scaled")],
)
def test_compare_refuses_what_auto_cannot_have(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    setting: tuple[str, str],
    where: tuple[str, ...],
) -> None:
    args = ("compare", mini_checkpoint, "--device", "cuda", *setting, *where)
    code, out, err = _run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{' '.join(setting)}: auto cannot have it" in err
    assert "decode_backend" not in err


def test_compare_takes_such_a_setting_where_both_arms_can_have_it(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    """It is refused for another reason: there is no device cuda:99 here."""
    args = ("--device", "cuda:99", "--arm-a", "latency_specialized", "--weight-prefetch", "l2")
    code, _, err = _run(capsys, "compare", mini_checkpoint, *args)
    assert code == 2
    assert "cuda:99" in err
    assert "auto cannot have it" not in err


def test_compare_writes_nothing_but_the_document_to_stdout(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    code, out, err = _run(
        capsys,
        *("compare", mini_checkpoint, "--prompts", 1, "--prompt-tokens", 5, "--blocks", 2),
        *("--output-tokens", 4, "--arm-b", "auto", "--json", "-", *ENGINE),
    )
    assert json.loads(out)["exit_code"] == code
    assert "verdict" in err


def test_compare_exercises_the_specialized_path(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "comparison.json"
    _run(
        capsys,
        *("compare", mini_checkpoint, "--prompts", 1, "--prompt-tokens", 5, "--blocks", 2),
        *("--output-tokens", 3, "--json", path, *ENGINE),
    )
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["differences"] == []
    assert [summary["coverage"] for summary in document["summaries"]] == [0.0, 1.0]


def test_compare_finds_a_wrong_backend(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One layer of the specialised arm decays too fast: no near-tie, and no ratio is printed."""
    from kdecode.engine import worker

    pack = worker.pack_model

    def packs_wrong(reader: object, trunk_format: str, *args: object) -> object:
        packed = pack(reader, trunk_format, *args)  # type: ignore[arg-type]
        if trunk_format != "rows":
            packed.layers[1].attention.decay_scale.mul_(2)
        return packed

    monkeypatch.setattr(worker, "pack_model", packs_wrong)
    path = tmp_path / "comparison.json"
    code, out, _ = _run(
        capsys,
        *("compare", mini_checkpoint, "--prompts", 1, "--prompt-tokens", 32, "--blocks", 2),
        *("--output-tokens", 16, "--json", path, *ENGINE),
    )
    assert code == 4
    assert "outputs differ" in out
    prompts = json.loads(path.read_text(encoding="utf-8"))["agreement"]["prompts"]
    assert sum(prompt["real"] for prompt in prompts) >= 3


def test_make_checkpoint_refuses_a_directory_that_has_one(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path
) -> None:
    code, _, err = _run(capsys, "make-checkpoint", mini_checkpoint, "--preset", "mini")
    assert code == 2
    assert "exists and is no empty directory" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "MODEL"], "one of the arguments --prompt --prompt-file is required"),
        (["generate", "MODEL", "--prompt", "x", "--max-tokens", "0"], "0 is below 1"),
        (["generate", "MODEL", "--prompt", "x", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "MODEL", "--prompt", ""], "The prompt has no tokens"),
        (["generate", "MODEL", "--prompt-file", "/no/such"], "/no/such cannot be read"),
        (["generate", "MODEL", "--prompt", "x", "--cache-dtype", "fp8"], "cache_scale is not set"),
        (["generate", "/no/such", "--prompt", "x"], "/no/such is not a directory"),
        (["generate", "EMPTY", "--prompt", "x"], "config.json"),
        (["generate", "MODEL", "--prompt", "x", "--device", "tpu"], "device is 'tpu'"),
        (["generate", "MODEL", "--prompt", "x", "--device", "cuda:99"], "device is 'cuda:99'"),
        (["plan", "MODEL", "--config", "MODEL"], "Give a MODEL or --config, not both"),
        (["plan", "--config", "/no/such"], "/no/such does not exist"),
        (["plan", "--config", ""], "--config is empty"),
        (["plan", "--config="], "--config is empty"),
        (["plan", "", "--config", "x"], "Give a MODEL or --config, not both"),
        (["plan", ""], "MODEL is empty"),
        (["check", ""], "MODEL is empty"),
        (["compare", ""], "MODEL is empty"),
        (["compare", "MODEL", "--json", ""], "the output file has no name"),
        (["generate", "", "--prompt", "x"], "MODEL is empty"),
        (["generate", "MODEL", "--prompt-file", ""], "cannot be read"),
        (["serve", ""], "MODEL is empty"),
        (["serve", "MODEL", "--config", ""], "cannot be read"),
        (["make-checkpoint", ""], "DIR is empty"),
        (["generate", "MODEL", "--prompt", "x", "--threads", "9999"], "num_threads is 9999"),
        (["generate", "MODEL", "--prompt", "x", "--page-tokens", "999999"], "from 1 to 65536"),
        (["generate", "MODEL", "--prompt", "x", "--max-tokens", "2000000"], "max_tokens is 2,0"),
        (["plan", "MODEL", "--decode-backend", "fast"], "invalid choice: 'fast'"),
        (["check", "MODEL", "--layers", "99"], "--layers is 99; the model has 9 layers"),
        (["check", "MODEL", "--cache-dtype", "fp8", "--cache-scale", "nan"], "cache_scale is nan"),
        (["compare", "MODEL", "--blocks", "1"], "blocks is 1; an interval needs at least 2"),
        (["compare", "MODEL", "--warmup-runs", "3", "2"], "warmup_runs is (3, 2)"),
        (["compare", "MODEL", "--output-tokens", "1"], "Output tokens are 1"),
        (["sing"], "invalid choice: 'sing'"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    tmp_path: Path,
    args: list[str],
    message: str,
) -> None:
    places = {"MODEL": str(mini_checkpoint), "EMPTY": str(tmp_path)}
    code, out, err = _run(capsys, *(places.get(arg, arg) for arg in args))
    assert code == 2
    assert out == ""
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_fault_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdecode.engine import worker

    def breaks(*args: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(worker, "pack_model", breaks)
    with pytest.raises(ZeroDivisionError):
        main(["generate", str(mini_checkpoint), "--prompt", "x"])


def test_an_interrupt_ends_with_130(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdecode.engine import worker

    def interrupts(*args: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "choose", interrupts)
    code, _, err = _run(capsys, "generate", mini_checkpoint, "--prompt", "x", *ENGINE)
    assert code == 130
    assert "interrupted" in err


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _parsers(part)


def test_help_says_each_default_once() -> None:
    texts = [part.format_help() for part in _parsers(build_parser())]
    assert len(texts) > 15
    options = [option for text in texts for option in re.split(r"\n  (?=-)", text)]
    for option in options:
        assert option.count("default:") <= 1, option
        assert "default: None" not in option
        assert "default: False" not in option
        assert not re.search(r"default: [\[({]", option), option
    for told in ("(default: 127.0.0.1)", "--top-p TOP_P (default: 1.0)", "(default: 3 10)"):
        assert any(told in " ".join(option.split()) for option in options), told


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\nfrom kdecode.cli import build_parser\nbuild_parser().format_help()\n"
        "import kdecode\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_a_line_a_phase_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kdecode.commands.common import ProgressBar

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for stream, expected in (
        (_Terminal(), r"(\r\x1b\[K[^\n]*)+"),
        (io.StringIO(), r"packing: 1 of 4\nblock 1 of 2\nblock 2 of 2\n"),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        bar = ProgressBar()
        for done in range(1, 5):
            bar("packing", done, 4)
        for block in (1, 2):
            for prompt in (1, 2):
                bar.message(f"block {block} of 2", f"prompt {prompt} of 2")
        bar.clear()
        assert re.fullmatch(expected, stream.getvalue())
        assert stream.isatty() == ("block 2 of 2, prompt 2 of 2" in stream.getvalue())


def _speculative(checkpoint: Path, **settings: object) -> str:
    """A --speculative-config with a random draft beside the checkpoint."""
    directory = checkpoint.parent / "mini-draft"
    if not directory.exists():
        make_draft(directory, "mini", "inferact", seed=0)
    return json.dumps({"model": str(directory), "num_speculative_tokens": 3, **settings})


def test_generate_with_a_draft(capsys: pytest.CaptureFixture[str], mini_checkpoint: Path) -> None:
    common = ("generate", mini_checkpoint, "--prompt", "the cat", "--max-tokens", 8, *ENGINE)
    common = (*common, "--ignore-eos")
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    for settings, is_valid in (({}, True), (synthetic, False)):
        given = ("--speculative-config", _speculative(mini_checkpoint, **settings))
        code, out, _ = _run(capsys, *common, *given, "--json")
        document = json.loads(out)
        assert (code, document["outputs_valid"]) == (0, is_valid)
        found = document["speculation"]
        assert found["rounds"] == found["steps"] > 0
        assert found["is_synthetic"] is not is_valid
        assert document["metrics"]["speculation"]["rounds"] == found["rounds"]
        assert document["config"]["speculative"]["num_speculative_tokens"] == 3
        assert len(document["token_ids"]) == 8
    assert found["acceptance_length"] == 3.0
    _, _, err = _run(capsys, *common, *given)
    assert "SYNTHETIC acceptance, no answer of the model: 3.00 tokens a round" in err


def test_compare_with_a_draft_makes_two_tables(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "comparison.json"
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    code, out, _ = _run(
        capsys,
        *("compare", mini_checkpoint, "--prompts", 1, "--prompt-tokens", 5, "--blocks", 2),
        *("--output-tokens", 7, "--arm-b", "auto", "--json", path, *ENGINE),
        *("--speculative-config", _speculative(mini_checkpoint, **synthetic)),
    )
    document = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0
    assert sorted(document) == ["plain", "speculative"]
    assert document["plain"]["engines"][0]["speculation"] is None
    found = document["speculative"]["engines"][0]["speculation"]
    assert found["acceptance_length"] == pytest.approx(3.0)
    assert found["draft_ns"] > 0
    least = document["speculative"]["engines"][0]["break_even_length"]
    assert 0.1 < least < 30
    assert ("auto (a): drafts do not pay" in out) == (found["acceptance_length"] < least)
    plain, _, speculative = out.partition("speculation dspark with 3 drafts, SYNTHETIC acceptance")
    assert "speculation none" in plain
    assert "SYNTHETIC: 3.00 tokens a round were asked for" in speculative


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens"),
        ({"draft_length": 3}, "draft_length is 3, which is no setting"),
        ({"num_speculative_tokens": 8}, "trained for at most 7"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_wrong_speculative_config_ends_in_one_line(
    capsys: pytest.CaptureFixture[str],
    mini_checkpoint: Path,
    settings: dict[str, object],
    message: str,
) -> None:
    given = ("--speculative-config", _speculative(mini_checkpoint, **settings))
    code, out, err = _run(capsys, "generate", mini_checkpoint, "--prompt", "a", *given, *ENGINE)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["inferact", "redhat"])
def test_check_compares_the_draft_of_both_backends(
    capsys: pytest.CaptureFixture[str], mini_checkpoint: Path, tmp_path: Path, kind: DraftKind
) -> None:
    make_draft(tmp_path / "draft", "mini", kind, seed=0)
    config = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 5})
    common = ("check", mini_checkpoint, "--steps", 1, "--prompt-tokens", 3, "--json", *ENGINE)
    code, out, _ = _run(capsys, *common, "--speculative-config", config)
    assert code == 0
    for backend in json.loads(out):
        found = {item["quantity"]: item for item in backend["model"]}
        for quantity in ("draft rows", "draft logits"):
            assert 0 < found[quantity]["backend"] <= found[quantity]["limit"] < 0.1
