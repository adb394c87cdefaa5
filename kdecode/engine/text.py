"""The text of one request as it grows, with stop strings.

Owns what may be shown when: characters are whole, and text that could be the beginning of a stop
string is held back until it is decided. The shown pieces, put together, do not depend on how the
tokens arrived. Does not know where tokens come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """`IncrementalDetokenizer` as far as it is used here."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopFilter:
    """Text pieces up to a stop string. `is_stopped` once one was found; nothing follows it."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._shown: list[str] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """Everything that was shown."""
        return "".join(self._shown)

    def push(self, text: str, *, can_stop: bool = True) -> str:
        """The text to show now. Without `can_stop`, stop strings are not looked for."""
        if self.is_stopped:
            return ""
        self._held += text
        if not can_stop:
            return self._show(len(self._held))
        return self._show_safe()

    def close(self, text: str = "") -> str:
        """The rest of the text, at its end; `text` is what still came."""
        shown = self.push(text)
        return shown if self.is_stopped else shown + self._show(len(self._held))

    def _show_safe(self) -> str:
        # The string that is complete first wins, however many characters came at once.
        found = [
            (begin + len(stop), begin)
            for stop in self._stop
            if (begin := self._held.find(stop)) >= 0
        ]
        if found:
            self.is_stopped = True
            shown = self._show(min(found)[1])
            self._held = ""
            return shown
        return self._show(len(self._held) - self._num_undecided())

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        if shown:
            self._shown.append(shown)
        return shown


class TextStream:
    """Text pieces of the tokens of one request, up to a stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._filter = StopFilter(stop)

    @property
    def text(self) -> str:
        """Everything that was shown."""
        return self._filter.text

    @property
    def is_stopped(self) -> bool:
        """A stop string was found; nothing follows it."""
        return self._filter.is_stopped

    def push(self, token_id: int, *, can_stop: bool = True) -> str:
        """The text to show now. Without `can_stop`, stop strings are not looked for."""
        if self.is_stopped:
            return ""
        return self._filter.push(self._detokenizer.push(token_id), can_stop=can_stop)

    def close(self) -> str:
        """The rest of the text, at the end of the request."""
        return "" if self.is_stopped else self._filter.close(self._detokenizer.flush())
