"""A mixture without shared experts: no stage for them, in the oracle and in both backends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kdecode.cli import main
from kdecode.config import ModelConfig
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.stages import layer_stages
from kdecode.model.synthesis import make_checkpoint


@pytest.mark.parametrize("preset", ["mini", "kimi-linear-mini"])
def test_every_backend_runs_it(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = replace(PRESETS[preset], num_shared=0)
    config = ModelConfig.from_checkpoint(released_config(sizes))
    assert "experts" in layer_stages(config, 1)
    assert "shared_mlp" not in layer_stages(config, 1)
    make_checkpoint(tmp_path / "model", sizes, seed=0)
    args = ["check", str(tmp_path / "model"), "--steps", "3", "--prompt-tokens", "5"]
    assert main([*args, "--threads", "1", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert [check["backend"] for check in checks] == ["auto", "latency_specialized"]
    for check in checks:
        assert all(step["is_within"] for step in check["steps"])
        assert {"expert_sum", "prefix"} <= {step["buffer"] for step in check["steps"]}
