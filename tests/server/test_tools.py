"""Tools that people point at a server: an evaluation, a load generator, a fuzzer. All slow.

Each has dependencies of its own, so it is found on PATH and not installed with the tests:

    python3 -m venv tools && tools/bin/pip install 'lm-eval[api]' guidellm torch schemathesis
    PATH="$PATH:$PWD/tools/bin" pytest -m slow tests/server/test_tools.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import running

pytestmark = pytest.mark.slow

BACKEND = ("--decode-backend", "latency_specialized")
MIN_CASES = 5000


def _run(name: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What the tool says, on both streams together; its exit code has to be 0."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on PATH; the module's docstring says how to install it")
    result = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout


def _task(folder: Path, name: str, **settings: Any) -> None:
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **settings,
    }
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def test_lm_eval(mini_checkpoint: Path, tmp_path: Path) -> None:
    """Likelihoods of given answers, and generated ones, of a local task."""
    rows = [
        {"question": "the cat sat on the", "choices": [" mat", " moon", " idea"], "answer": 0},
        {"question": "one two three", "choices": [" four", " red"], "answer": 1},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    choices = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    _task(
        tmp_path,
        "tiny_choice",
        output_type="multiple_choice",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
        **choices,
    )
    _task(
        tmp_path,
        "tiny_text",
        output_type="generate_until",
        doc_to_target="{{choices[answer]}}",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )
    with running(mini_checkpoint, *BACKEND, "--max-model-len", "1024") as (_, url):
        model = f"model=mini,base_url={url}/v1/completions,tokenizer_backend=remote"
        arguments = ["run", "--model", "local-completions", "--model_args", model]
        arguments[-1] += ",max_length=1024,num_concurrent=2"
        arguments += ["--tasks", "tiny_choice,tiny_text", "--include_path", str(tmp_path)]
        _run("lm_eval", *arguments, "--output_path", str(tmp_path / "out"), folder=tmp_path)
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    assert results["tiny_choice"]["acc,none"] in (0, 0.5, 1)
    assert results["tiny_text"]["exact_match,none"] in (0, 0.5, 1)


def test_guidellm(mini_checkpoint: Path, tmp_path: Path) -> None:
    """Eight chats at a concurrency of 2; what it counted is what was asked for."""
    rows = [{"prompt": f"the cat {i}", "output_tokens_count": 12} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with running(mini_checkpoint, *BACKEND, "--max-model-len", "1024") as (_, url):
        _run(
            "guidellm",
            "run",
            *("--backend", f"kind=openai_http,target={url},model=mini"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=8"),
            *("--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}"),
            *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
            "--disable-console",
            folder=tmp_path,
        )
        metrics = httpx.get(f"{url}/metrics").text
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0)
    generated = re.search(r"^vllm:generation_tokens_total{.*} (\S+)", metrics, re.MULTILINE)
    assert generated is not None
    assert float(generated[1]) >= 8 * 12
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"] > 0


def test_schemathesis(mini_checkpoint: Path, tmp_path: Path) -> None:
    """Bodies from the server's own description: never a 5xx, and many of them run."""
    flags = ("--max-model-len", "512", *BACKEND)
    with running(mini_checkpoint, *flags) as (process, url):
        report = _run(
            "st",
            *("run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
            *("--phases", "fuzzing", "--include-method", "POST", "--max-examples", "1500"),
            *("--request-timeout", "60", "--suppress-health-check", "all", "--seed", "1"),
            *("--continue-on-failure", "--workers", "1", "--no-color"),
            folder=tmp_path,
            SCHEMATHESIS_HOOKS="fuzz_hooks",
            PYTHONPATH=str(Path(__file__).parent),
        )
        cases = re.search(r"(\d+) generated, (\d+) passed", report)
        assert cases is not None, report[-3000:]
        assert int(cases[1]) == int(cases[2]) >= MIN_CASES
        assert process.poll() is None
        assert httpx.get(f"{url}/health").status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
    ended = re.findall(r"^vllm:request_success_total{.*} (\S+)", metrics, re.MULTILINE)
    assert sum(map(float, ended)) > MIN_CASES / 20
