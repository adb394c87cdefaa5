"""`kdecode eval` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdecode.cli import main

TEXT = Path(__file__)


def test_text_prints_every_arm(mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "40", "--window-tokens", "16", "--cache-scale", "1"]
    dtypes = ["--cache-dtypes", "bf16", "fp8"]
    command = ["eval", "text", str(mini_checkpoint), "--text", str(TEXT)]
    assert main([*command, *options, *dtypes, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    arms = {(arm["backend"], arm["cache_dtype"]): arm for arm in document["arms"]}
    assert len(arms) == 4
    plain = arms["auto", "bf16"]
    assert plain["num_tokens"] == 39
    assert arms["latency_specialized", "bf16"]["nats"] == pytest.approx(plain["nats"], rel=2e-3)
    assert arms["latency_specialized", "bf16"]["coverage"] == 1.0
    assert main([*command, *options, *dtypes]) == 0
    assert "39 tokens" in capsys.readouterr().out


def test_needles_count_what_was_found(
    mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "needles", str(mini_checkpoint), "--text", str(TEXT)]
    assert main([*command, "--distances", "50", "--items", "2"]) == 0
    assert "of 2" in capsys.readouterr().out
    assert main([*command, "--distances", "100000"]) == 2
    assert "cannot be cut" in capsys.readouterr().err


def test_a_scale_without_an_fp8_cache_is_refused(
    mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "text", str(mini_checkpoint), "--text", str(TEXT)]
    assert main([*command, "--cache-scale", "1"]) == 2
    assert "none of the caches is fp8" in capsys.readouterr().err
