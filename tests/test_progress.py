"""The progress line: as wide as the terminal, and plain lines where nothing can be drawn over."""

from __future__ import annotations

import io
import re

import pytest

from kdecode.commands.common import ProgressBar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _written(monkeypatch: pytest.MonkeyPatch, columns: int, term: str = "xterm") -> str:
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", term)
    for done in range(1, 1001):
        # A bar of its own each, because one that was just drawn waits.
        ProgressBar()("tensors of the default model", done, 1000)
    bar = ProgressBar()
    bar.message("block 1 of 2", "prompt 3 of 8, latency_specialized")
    bar.clear()
    return stream.getvalue()


@pytest.mark.parametrize("columns", [1, 2, 20, 40, 41, 43, 60, 80, 300])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    lines = _written(monkeypatch, columns).split("\r\033[K")
    assert max(map(len, lines)) <= max(columns - 1, 1)
    assert "\n" not in "".join(lines)
    if columns >= 60:
        assert any(re.search(r" \[#+\.*\] 1000/1000$", line) for line in lines)
    if columns >= 80:
        assert f"tensors of the default model [{'#' * 15}{'.' * 15}] 500/1000" in lines
    elif columns == 40:
        assert "tensors of the default model 500/1000" in lines


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    text = _written(monkeypatch, 40, term)
    assert "\r" not in text
    assert "\033" not in text
    assert text.endswith("tensors of the default model: 1000 of 1000\nblock 1 of 2\n")
