"""The default model: made once, whole or not at all, in a folder of its own version."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from kdecode.model import default_model
from kdecode.model.default_model import default_model_directory
from kdecode.model.weights import CheckpointReader


def test_default_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDECODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "DEFAULT_PRESET", "mini")
    directory = default_model_directory()
    made = (directory / "config.json").stat().st_mtime_ns
    assert default_model_directory() == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_crash_leaves_no_half_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "DEFAULT_PRESET", "mini")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("kdecode.model.tokenizer.write_tokenizer", fail)
        with pytest.raises(OSError, match="disk full"):
            default_model_directory()
    assert list(tmp_path.iterdir()) == []
    CheckpointReader(default_model_directory()).load_model()


def _make_default(cache_dir: str) -> str:
    import os

    os.environ["KDECODE_CACHE_DIR"] = cache_dir
    default_model.DEFAULT_PRESET = "mini"
    return str(default_model_directory())


def test_makers_at_the_same_time(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        made = pool.map(_make_default, [str(tmp_path)] * 3)
    assert len(set(made)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [Path(made[0]).name]
    CheckpointReader(made[0]).load_model()


def test_another_version_of_the_synthesis_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "DEFAULT_PRESET", "mini")
    with monkeypatch.context() as patch:
        patch.setattr(default_model, "SYNTHESIS_DIGEST", "of an earlier version")
        earlier = default_model_directory()
    assert default_model_directory() != earlier
    assert len(list(tmp_path.iterdir())) == 2
