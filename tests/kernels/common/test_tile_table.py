"""The tile table: what an entry overrides, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kdecode.kernels.common import tile_table
from kdecode.kernels.common.tile_table import (
    TileEntry,
    TileKey,
    TileTableError,
    choose,
    forced,
    read_table,
    recording,
    write_table,
)


@dataclass(frozen=True)
class Tile:
    block_n: int
    num_warps: int


KEY = TileKey("projection", "sm_90", "rows 1, 1536 x 7168")
DEFAULT = Tile(16, 4)


def _document(**changes: Any) -> dict[str, Any]:
    entry = {
        "kernel": KEY.kernel,
        "arch": KEY.arch,
        "shape": KEY.shape,
        "tile": {"block_n": 32, "num_warps": 8},
        "measured": "somewhere",
    }
    return {"version": 1, "entries": [{**entry, **changes}]}


def _write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = read_table(_write(tmp_path / "table.json", _document()))
    monkeypatch.setattr(tile_table, "table", lambda: entries)


def test_the_committed_table_is_valid_and_sorted(tmp_path: Path) -> None:
    entries = read_table(tile_table.PATH)
    copy = tmp_path / "copy.json"
    write_table(copy, list(entries.values()))
    assert copy.read_text() == tile_table.PATH.read_text()


@pytest.mark.usefixtures("one_entry")
def test_an_entry_is_for_its_kernel_architecture_and_shape_alone() -> None:
    assert choose(KEY.kernel, KEY.arch, KEY.shape, DEFAULT) == Tile(32, 8)
    assert choose("other", KEY.arch, KEY.shape, DEFAULT) is DEFAULT
    assert choose(KEY.kernel, "sm_100", KEY.shape, DEFAULT) is DEFAULT
    assert choose(KEY.kernel, KEY.arch, "rows 2, 1536 x 7168", DEFAULT) is DEFAULT


@pytest.mark.usefixtures("one_entry")
def test_an_entry_of_other_fields_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Other:
        block_n: int

    with pytest.raises(TileTableError, match=r"has block_n, num_warps; the kernel's tiles have"):
        choose(KEY.kernel, KEY.arch, KEY.shape, Other(16))


@pytest.mark.usefixtures("one_entry")
def test_a_tuner_sees_what_is_asked_for_and_forces_an_answer() -> None:
    with recording() as asked:
        choose(KEY.kernel, KEY.arch, KEY.shape, DEFAULT)
    assert asked == {KEY: DEFAULT}
    with forced({KEY: Tile(64, 2)}):
        assert choose(KEY.kernel, KEY.arch, KEY.shape, DEFAULT) == Tile(64, 2)
    assert choose(KEY.kernel, KEY.arch, KEY.shape, DEFAULT) == Tile(32, 8)


def test_a_written_table_reads_back(tmp_path: Path) -> None:
    entries = [
        TileEntry(TileKey(kernel, "sm_103", "rows 1"), {"block_n": 16}, "words")
        for kernel in ("b", "a")
    ]
    write_table(tmp_path / "table.json", entries)
    assert list(read_table(tmp_path / "table.json").values()) == entries[::-1]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"version": 1}, "has no entries"),
        ({"version": 2, "entries": []}, "has version 2; this program reads 1"),
        ({"version": 1, "entries": {}}, "it must be a list"),
        ({"version": 1, "entries": [], "note": ""}, "the unknown field note"),
        ({"version": 1, "entries": [3]}, "entry 0 is 3; it must be an object"),
        (_document(stages=2), "the unknown field stages"),
        (_document(arch="hopper"), "arch is 'hopper'; it must be like sm_90"),
        (_document(kernel=""), "kernel is ''; it must be a text"),
        (_document(measured=3), "measured is 3; it must be a text"),
        (_document(tile={}), "it must be an object with fields"),
        (_document(tile={"block_n": 0}), "block_n of the tile is 0; it must be a whole number"),
        (_document(tile={"block_n": True}), "block_n of the tile is True"),
        (_document(tile={"block_n": 16.0}), "block_n of the tile is 16.0"),
        (_document(tile={"block_n": 1 << 17}), "from 1 to 65,536"),
        ({"version": 1, "entries": _document()["entries"] * 2}, "a second entry for"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(TileTableError, match=message):
        read_table(_write(tmp_path / "table.json", document))
