"""Every file of a checkpoint as somebody hostile would write it: one short error, never a fault."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from released import kimi_k3, kimi_linear

from kdecode.config import ConfigError, ModelConfig
from kdecode.config_checkpoint import (
    IRRELEVANT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from kdecode.config_draft import DraftConfig
from kdecode.config_json import shown
from kdecode.model.shards import CheckpointError, Shard
from kdecode.model.tokenizer import CONFIG_FILE, MODEL_FILE, Tokenizer, TokenizerError
from kdecode.model.weights import INDEX_FILE, CheckpointReader

SHARD = "model-00001-of-000004.safetensors"
Reader = tuple[type[ValueError], Callable[[Path], object]]
READERS: dict[str, Reader] = {
    "config.json": (ConfigError, ModelConfig.from_checkpoint),
    INDEX_FILE: (CheckpointError, CheckpointReader),
    SHARD: (CheckpointError, lambda directory: Shard(directory / SHARD)),
    CONFIG_FILE: (TokenizerError, lambda directory: Tokenizer.from_directory(directory, 1536)),
}
DEEP = b'{"a":' * 30 + b"{}" + b"}" * 30


@pytest.fixture
def directory(mini_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mini_checkpoint, tmp_path / "model"))


def refused(directory: Path, name: str) -> str:
    error, read = READERS[name]
    with pytest.raises(error) as caught:
        read(directory)
    message = str(caught.value)
    assert str(directory / name) in message
    # A message is read by people.
    assert len(message) < 400 + len(str(directory))
    return message


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 200_000, "nests deeper than 32"),
        (b'{"a":' * 100_000, "nests deeper than 32"),
        (b'{"a":' * 32 + b"{}" + b"}" * 32, "nests deeper than 32"),
        (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "nests deeper than 32"),
        (b'{\n"a": ' + b"9" * 5000 + b"}", "line 2 has the number 9999"),
        (b'{"a": -' + b"9" * 41 + b"}", "a whole number may have 40"),
        (b'{"a": 1, "a": 2}', "names a more than once"),
        (b'{"' + b"k" * 5000 + b'": 1, "' + b"k" * 5000 + b'": 2}', "5,002 characters"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDfff": 1}', "half of a surrogate pair"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b"\xff\xfe", "cannot be read"),
        (b"\xef\xbb\xbf{}", "cannot be read"),
        (b"", "cannot be read"),
        (b"3", "is a int, not an object"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else value,
)
def test_json_that_is_refused(directory: Path, name: str, text: bytes, words: str) -> None:
    prefix = struct.pack("<Q", len(text)) if name == SHARD else b""
    (directory / name).write_bytes(prefix + text)
    assert words in refused(directory, name)


@pytest.mark.parametrize("name", [name for name in READERS if name != INDEX_FILE])
def test_json_below_the_limits_is_read(directory: Path, name: str) -> None:
    """What is wrong then is what it says."""
    text = DEEP[:-1] + b', "\\ud83d\\ude00": ' + b"9" * 40 + b"}"
    prefix = struct.pack("<Q", len(text)) if name == SHARD else b""
    (directory / name).write_bytes(prefix + text)
    error, read = READERS[name]
    with pytest.raises(error) as caught:
        read(directory)
    assert "not valid" not in str(caught.value)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    # A short name from inside the folder: the path of a socket has a limit of its own.
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


@pytest.mark.parametrize("name", [*READERS, MODEL_FILE])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_pipe, "a named pipe"),
        (_socket, "a socket"),
        (Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
    ],
    ids=["pipe", "socket", "directory", "device", "nothing"],
)
def test_only_regular_files_are_read(
    directory: Path, name: str, make: Callable[[Path], Any], words: str
) -> None:
    (directory / name).unlink()
    make(directory / name)
    error, read = READERS.get(name, READERS[CONFIG_FILE])
    with pytest.raises(error) as caught:
        read(directory)
    assert str(directory / name) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", CONFIG_FILE])
def test_a_file_without_end_is_not_read_whole(directory: Path, name: str) -> None:
    os.truncate(directory / name, 1 << 40)
    assert "more than 16,777,216 bytes" in refused(directory, name)


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("num_hidden_layers", MAX_LAYERS),
        ("num_experts", MAX_EXPERTS),
        ("num_shared_experts", MAX_EXPERTS),
        ("vocab_size", MAX_VOCABULARY),
        ("hidden_size", MAX_WIDTH),
        ("intermediate_size", MAX_WIDTH),
        ("moe_intermediate_size", MAX_WIDTH),
        ("kv_lora_rank", MAX_WIDTH),
        ("num_attention_heads", 4096),
    ],
)
@pytest.mark.parametrize("value", [10**39, 10**9])
def test_counts_have_limits(key: str, limit: int, value: int) -> None:
    document = kimi_k3()
    document["text_config"][key] = value
    with pytest.raises(ConfigError, match=rf"{key} is {value}; it must be from \d to {limit}\."):
        ModelConfig.from_checkpoint(document)


def test_every_count_of_a_release_is_bounded() -> None:
    """Each whole number of both configurations; what it is named in the error is itself."""
    for release in (kimi_k3, kimi_linear):
        for outer in ("", "linear_attn_config"):
            for key, value in _body(release(), outer).items():
                if isinstance(value, bool) or not isinstance(value, int) or key == "rope_theta":
                    continue
                document = release()
                _body(document, outer)[key] = 10**39
                if key == "head_dim" and not outer:
                    continue
                with pytest.raises(ConfigError, match=f"{key} is 1000"):
                    ModelConfig.from_checkpoint(document)


def _body(document: dict[str, Any], section: str) -> dict[str, Any]:
    body: dict[str, Any] = document.get("text_config", document)
    return body[section] if section else body


def test_more_layers_than_the_files_have_end_at_the_first_one(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = MAX_LAYERS
    config["text_config"]["num_experts"] = MAX_EXPERTS
    layers = config["text_config"]["linear_attn_config"]
    layers["kda_layers"] += range(10, MAX_LAYERS + 1)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected shape"):
        CheckpointReader(directory)


@pytest.mark.parametrize("read", [ModelConfig.from_checkpoint, DraftConfig.from_checkpoint])
@pytest.mark.parametrize("value", ["x" * 10_000, ["y"] * 10_000, {"z": "z" * 10_000}])
def test_a_long_value_is_cut_in_the_message(read: Callable[[Any], Any], value: object) -> None:
    document = kimi_linear()
    # Nothing in the maths depends on the others.
    for key in [key for key in document if key not in IRRELEVANT] + ["what", "w" * 10_000]:
        with pytest.raises(ConfigError) as caught:
            read({**document, key: value})
        assert len(str(caught.value)) < 500


def test_what_is_shown_of_a_value() -> None:
    assert shown("a") == "'a'"
    assert shown("é\n\ud800") == r"'é\n\ud800'"
    assert shown("b" * 98) == "'" + "b" * 98 + "'"
    assert shown("b" * 99) == "'" + "b" * 99 + "... (101 characters)"
    assert "too large to show" in shown(10**5000)
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert "too large to show" in shown(nested)
