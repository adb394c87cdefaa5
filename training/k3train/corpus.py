"""The text: Python's standard library, its split and its tokens.

Owns which files are read, in which order, and which are held out. The source is the interpreter
that runs the training, so that no download is needed; `Corpus.digest` says whether it was the same.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kdecode.model.tokenizer import Tokenizer

# Tables of character maps and of topics for a help command: text, but no prose and no program.
_EXCLUDED_DIRS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
# Larger files of the library are generated tables.
_MAX_FILE_BYTES = 300_000
# One file in so many is held out, by a digest of its path.
HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Corpus:
    """Texts of the training part and of the held-out part, in order of their paths."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    digest: str

    @classmethod
    def read(cls) -> Corpus:
        """Reads the standard library of the running interpreter."""
        root = Path(sysconfig.get_paths()["stdlib"])
        parts: dict[bool, list[str]] = {True: [], False: []}
        sha = hashlib.sha256()
        for path in _files(root):
            name = path.relative_to(root).as_posix()
            data = path.read_bytes()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            sha.update(f"{name}\n{len(data)}\n".encode() + data)
            parts[_is_held_out(name)].append(text)
        return cls(tuple(parts[False]), tuple(parts[True]), sha.hexdigest())


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _EXCLUDED_DIRS.isdisjoint(inside.parts) and 0 < path.stat().st_size <= _MAX_FILE_BYTES:
            yield path


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_EVERY == 0


def token_stream(tokenizer: Tokenizer, texts: tuple[str, ...], end_id: int) -> NDArray[np.uint16]:
    """All texts as one stream of ids, each followed by end_id. The vocabulary is below 65,536."""
    ids: list[int] = []
    for text in texts:
        ids.extend(tokenizer.encode_text(text))
        ids.append(end_id)
    return np.asarray(ids, dtype=np.uint16)
