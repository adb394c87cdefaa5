"""The model that comes with the package: whole, listed, and refused where it is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kdecode.config import ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.model import default_model
from kdecode.model.default_model import (
    SHIPPED,
    SUMS_FILE,
    default_draft_directory,
    default_model_directory,
    read_sums,
)
from kdecode.model.draft_weights import load_draft
from kdecode.model.shards import CheckpointError
from kdecode.model.weights import CheckpointReader

MOST_BYTES = 40 * 10**6


def test_both_checkpoints_load_in_the_released_layout() -> None:
    config = ModelConfig.from_checkpoint(default_model_directory())
    assert config.model_type == "kimi_k3"
    assert config.moe.expert_format == "mxfp4"
    assert len(set(config.layer_kinds)) == len(set(config.mlp_kinds)) == 2
    CheckpointReader(default_model_directory()).load_model()
    load_draft(default_draft_directory(), DraftConfig.from_checkpoint(default_draft_directory()))


def test_every_shipped_file_has_a_sum_and_together_they_are_small() -> None:
    files = {path.relative_to(SHIPPED).as_posix() for path in SHIPPED.rglob("*") if path.is_file()}
    assert files - {SUMS_FILE, "MODEL_CARD.md"} == set(read_sums(SHIPPED))
    assert sum((SHIPPED / file).stat().st_size for file in files) < MOST_BYTES


@pytest.mark.parametrize("harm", ["changed", "gone", "no sums"])
def test_a_damaged_file_is_named(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(SHIPPED, shipped)
    monkeypatch.setattr(default_model, "SHIPPED", shipped)
    file = shipped / "k3-tiny" / "config.json"
    if harm == "changed":
        file.write_bytes(file.read_bytes() + b" ")
    elif harm == "gone":
        file.unlink()
    else:
        file = shipped / SUMS_FILE
        file.unlink()
    with pytest.raises(CheckpointError, match="install kdecode anew") as caught:
        default_model_directory()
    assert str(file) in str(caught.value)
