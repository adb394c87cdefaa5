"""The default model: made once, whole or not at all, in a folder of its own version."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kdecode.model import default_model
from kdecode.model.building import building
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


def _emptied(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def _a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.touch()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated shard": lambda d: os.truncate(next(d.glob("*.safetensors")), 1000),
    "missing shard": lambda d: next(d.glob("*.safetensors")).unlink(),
    "empty configuration": lambda d: (d / "config.json").write_text("{}"),
    "missing configuration": lambda d: (d / "config.json").unlink(),
    "missing index": lambda d: (d / "model.safetensors.index.json").unlink(),
    "other tokenizer": lambda d: (d / "tiktoken.model").write_text("YQ== 0"),
    "missing tokenizer settings": lambda d: (d / "tokenizer_config.json").unlink(),
    "emptied": _emptied,
    "a file": _a_file,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_made_anew(
    damage: str, mini_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "DEFAULT_PRESET", "mini")
    directory = tmp_path / default_model._folder_name()
    shutil.copytree(mini_checkpoint, directory)
    DAMAGE[damage](directory)
    assert default_model_directory() == directory
    assert list(tmp_path.iterdir()) == [directory]
    for path in mini_checkpoint.iterdir():
        assert (directory / path.name).read_bytes() == path.read_bytes()


def test_a_damaged_model_is_made_anew_by_several_at_once(
    mini_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "DEFAULT_PRESET", "mini")
    directory = tmp_path / default_model._folder_name()
    shutil.copytree(mini_checkpoint, directory)
    (directory / "config.json").unlink()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert set(pool.map(_make_default, [str(tmp_path)] * 3)) == {str(directory)}
    assert list(tmp_path.iterdir()) == [directory]
    CheckpointReader(directory).load_model()


_MAKER = """
import sys
from pathlib import Path
from kdecode.model.building import building
with building(Path(sys.argv[1])) as made:
    (made / "something").write_bytes(b"x")
    print("building", flush=True)
    sys.stdin.read()
"""


def test_a_folder_whose_maker_was_killed_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "DEFAULT_PRESET", "mini")
    makers = []
    for name in ("earlier-version", "other"):
        command = [sys.executable, "-c", _MAKER, str(tmp_path / name)]
        maker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"building\n"
        makers.append(maker)
    killed, living = makers
    killed.kill()
    killed.wait()
    assert len(list(tmp_path.glob("*.partial-*"))) == 2
    directory = default_model_directory()
    (kept,) = tmp_path.glob("*.partial-*")
    assert kept.name.startswith("other.partial-")
    living.communicate()
    assert living.returncode == 0
    assert sorted(tmp_path.iterdir()) == sorted([directory, tmp_path / "other"])
    # A finished model does not keep what a killed maker leaves.
    (tmp_path / "third.partial-abc").mkdir()
    default_model_directory()
    assert sorted(tmp_path.iterdir()) == sorted([directory, tmp_path / "other"])


def test_a_maker_removes_what_earlier_ones_of_its_target_left(tmp_path: Path) -> None:
    for name in ("a.partial-1", "b.partial-2", "a.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.partial-link").symlink_to(tmp_path / "b.partial-2")
    with building(tmp_path / "a") as made:
        (made / "file").touch()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a", "b.partial-2", "a.partial", "a.partial-link"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
