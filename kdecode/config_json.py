"""Files that others wrote: regular ones only, read within a limit, as strict JSON.

Owns how such a file is opened, which JSON is taken, and how its names and values are shown in an
error: every reader of configurations, indices, headers and tokenizer files goes through here. What
a file means is its reader's; the kind of error is, too. No torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

# Of configurations and tokenizer settings; the released ones have some ten thousand bytes.
MAX_CONFIG_BYTES = 16 << 20
# Released files nest six deep. Beyond some hundreds Python's own recursion would end the process.
MAX_DEPTH = 32
# 64 bits have 20; Python refuses to write out numbers of some thousand digits.
MAX_DIGITS = 40
SHOWN_CHARS = 100

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def shown(value: object) -> str:
    """A value in an error message: its repr, cut where it would fill the screen."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a value of type {type(value).__name__} that is too large to show"
    if len(text) <= SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]}... ({len(text):,} characters)"


def named(name: str) -> str:
    """A name in an error message: as it is, unless it is long or does not print."""
    return name if name.isprintable() and len(name) <= SHOWN_CHARS else shown(name)


def open_regular(path: Path, error: type[ValueError]) -> BinaryIO:
    """Opens a file for reading. Raises ``error`` where there is none or it is no regular file.

    Opening or reading a pipe or a device could wait for ever.
    """
    try:
        _check_regular(path, path.stat().st_mode, error)
        # Should it become a pipe now, opening it still does not wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path} does not exist.") from None
    except ValueError as bad:
        if isinstance(bad, error):
            raise
        raise error(f"{shown(str(path))} is no path of a file: {bad}.") from None
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(path, os.fstat(descriptor).st_mode, error)
    except ValueError:
        file.close()
        raise
    return file


def read_regular(path: Path, error: type[ValueError], limit: int) -> bytes:
    """A file's bytes. Raises ``error`` for more than ``limit`` of them."""
    with open_regular(path, error) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise error(f"{path} has more than {limit:,} bytes, which is the limit for this file.")
    return data


def read_json_object(
    path: Path, error: type[ValueError], limit: int = MAX_CONFIG_BYTES
) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ``error`` with the file and what is wrong."""
    return parse_json_object(read_regular(path, error, limit), str(path), error)


def parse_json_object(source: bytes | str, where: str, error: type[ValueError]) -> dict[str, Any]:
    """A JSON object without repeated keys, endless numbers or nesting, and broken text.

    where: what the text is, for errors.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise error(f"{where} names {named(twice)} more than once.")
        return made

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            line = text.count("\n", 0, text.find(digits)) + 1
            raise error(
                f"{where} is not valid: line {line} has the number {digits[:MAX_DIGITS]}... of "
                f"{len(digits):,} digits; a whole number may have {MAX_DIGITS}."
            )
        return int(digits)

    def constant(name: str) -> float:
        raise error(f"{where} is not valid: {name} is no number of JSON.")

    too_deep = f"{where} is not valid: its JSON nests deeper than {MAX_DEPTH} levels."
    try:
        text = source if isinstance(source, str) else source.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=unique, parse_int=integer, parse_constant=constant
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as bad:
        raise error(f"{where} is not valid: its JSON cannot be read ({bad}).") from None
    except RecursionError:
        raise error(too_deep) from None
    if not isinstance(value, dict):
        raise error(f"{where} is not valid: its JSON is a {type(value).__name__}, not an object.")
    if _depth_exceeds(value, MAX_DEPTH):
        raise error(too_deep)
    if _SURROGATE.search(text):
        _check_text(value, where, error)
    return value


def _check_regular(path: Path, mode: int, error: type[ValueError]) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise error(f"{path} is {kind}; only regular files are read.")


def _depth_exceeds(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _check_text(value: object, where: str, error: type[ValueError]) -> None:
    """Half of a surrogate pair is no character: it could be neither printed nor encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as bad:
        code = ord(bad.object[bad.start])
        raise error(
            f"{where} is not valid: a text in it has half of a surrogate pair, \\u{code:04x}."
        ) from None
