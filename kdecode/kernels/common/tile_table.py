"""Tile sizes that were measured to be faster than a kernel's own default: `tile_table.json`.

Owns the table's format and who wins: a kernel asks `choose` with its default, and gets the table's
entry for its architecture and shape where there is one. Knows no kernel: a tile is a frozen
dataclass of positive whole numbers, and an entry has to name exactly its fields. Nothing here needs
Triton or a GPU.

`recording` and `forced` are for the tuner: what a plan asks for, and one answer for a while.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from kdecode.config_json import named, read_json_object, shown

PATH = Path(__file__).with_name("tile_table.json")
VERSION = 1
# No tile has a larger number: a block of columns, a count of warps, of stages or of splits.
MAX_VALUE = 1 << 16
_MAX_BYTES = 4 << 20
_ENTRY_FIELDS = frozenset({"kernel", "arch", "shape", "tile", "measured"})
_ARCH = re.compile(r"sm_[1-9][0-9]{1,2}")

T = TypeVar("T")


class TileTableError(ValueError):
    """A table that cannot be read, or an entry that does not fit the kernel that asks for it."""


@dataclass(frozen=True)
class TileKey:
    """What an entry is for. shape: the sizes as the kernel writes them, "rows 2, 1536 x 7168"."""

    kernel: str
    arch: str
    shape: str


@dataclass(frozen=True)
class TileEntry:
    """measured: where and what was measured, in words; printed, never read."""

    key: TileKey
    tile: Mapping[str, int]
    measured: str


_forced: ContextVar[Mapping[TileKey, Any] | None] = ContextVar("forced tiles", default=None)
_recorded: ContextVar[dict[TileKey, Any] | None] = ContextVar("asked for", default=None)


def choose(kernel: str, arch: str, shape: str, default: T) -> T:
    """The table's tile for this use of a kernel, else ``default``, a frozen dataclass of ints.

    kernel: the name of the jitted function or of the op. arch: "sm_90"; "" has no entries. Raises
    TileTableError for an entry with other fields than ``default``.
    """
    key = TileKey(kernel, arch, shape)
    asked = _recorded.get()
    if asked is not None:
        asked[key] = default
    fixed = _forced.get()
    if fixed is not None and key in fixed:
        return cast(T, fixed[key])
    entry = table().get(key)
    return default if entry is None else _filled(default, entry)


@lru_cache(maxsize=1)
def table() -> Mapping[TileKey, TileEntry]:
    """The committed table, read once a process."""
    return read_table(PATH)


def read_table(path: Path) -> dict[TileKey, TileEntry]:
    """A table file, by key. Raises TileTableError for anything that is not as documented."""
    document = read_json_object(path, TileTableError, _MAX_BYTES)
    _check_fields(document, frozenset({"version", "entries"}), str(path))
    if document["version"] != VERSION:
        raise TileTableError(
            f"{path} has version {shown(document['version'])}; this program reads {VERSION}."
        )
    if not isinstance(document["entries"], list):
        raise TileTableError(f"{path}: entries is {shown(document['entries'])}; it must be a list.")
    entries: dict[TileKey, TileEntry] = {}
    for number, value in enumerate(document["entries"]):
        entry = _entry(value, f"{path}, entry {number}")
        if entry.key in entries:
            raise TileTableError(f"{path}, entry {number}: a second entry for {entry.key}.")
        entries[entry.key] = entry
    return entries


def write_table(path: Path, entries: Sequence[TileEntry]) -> None:
    """Writes a table, sorted, an entry a line; what `read_table` would refuse raises as there."""
    lines = []
    for entry in sorted(entries, key=lambda entry: dataclasses.astuple(entry.key)):
        value = {
            **dataclasses.asdict(entry.key),
            "tile": dict(entry.tile),
            "measured": entry.measured,
        }
        _entry(value, f"the entry of {entry.key}")
        lines.append(f"  {json.dumps(value)}")
    body = "[\n" + ",\n".join(lines) + "\n ]" if lines else "[]"
    path.write_text(f'{{"version": {VERSION},\n "entries": {body}}}\n', encoding="utf-8")


@contextmanager
def recording() -> Iterator[dict[TileKey, Any]]:
    """The keys that `choose` is asked for inside of the block, each with its default."""
    asked: dict[TileKey, Any] = {}
    token = _recorded.set(asked)
    try:
        yield asked
    finally:
        _recorded.reset(token)


@contextmanager
def forced(tiles: Mapping[TileKey, Any]) -> Iterator[None]:
    """Inside of the block `choose` gives these tiles, whatever the table has."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


def _filled(default: T, entry: TileEntry) -> T:
    if not dataclasses.is_dataclass(default) or isinstance(default, type):
        raise TypeError(f"A tile is a frozen dataclass of whole numbers; this is {default!r}.")
    names = {field.name for field in dataclasses.fields(default)}
    if set(entry.tile) != names:
        raise TileTableError(
            f"The tile table's entry for {entry.key} has {', '.join(sorted(entry.tile))}; the "
            f"kernel's tiles have {', '.join(sorted(names))}."
        )
    return type(default)(**entry.tile)


def _entry(value: object, where: str) -> TileEntry:
    if not isinstance(value, dict):
        raise TileTableError(f"{where} is {shown(value)}; it must be an object.")
    _check_fields(value, _ENTRY_FIELDS, where)
    for name in sorted(_ENTRY_FIELDS - {"tile"}):
        if not isinstance(value[name], str) or not value[name]:
            raise TileTableError(f"{where}: {name} is {shown(value[name])}; it must be a text.")
    if not _ARCH.fullmatch(value["arch"]):
        raise TileTableError(f"{where}: arch is {shown(value['arch'])}; it must be like sm_90.")
    tile = value["tile"]
    if not isinstance(tile, dict) or not tile:
        raise TileTableError(f"{where}: tile is {shown(tile)}; it must be an object with fields.")
    for name, number in tile.items():
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if not is_whole or not 1 <= number <= MAX_VALUE:
            raise TileTableError(
                f"{where}: {named(name)} of the tile is {shown(number)}; it must be a whole number "
                f"from 1 to {MAX_VALUE:,}."
            )
    key = TileKey(value["kernel"], value["arch"], value["shape"])
    return TileEntry(key, tile, value["measured"])


def _check_fields(value: Mapping[str, Any], expected: frozenset[str], where: str) -> None:
    missing, unknown = expected - value.keys(), value.keys() - expected
    if missing:
        raise TileTableError(f"{where} has no {', '.join(sorted(missing))}.")
    if unknown:
        raise TileTableError(
            f"{where} has the unknown field {named(sorted(unknown)[0])}; the fields are "
            f"{', '.join(sorted(expected))}."
        )
