"""Rows of a verify step that has run: which slots have them, and how many stay.

A verify step writes MLA rows and leaves KDA slots as they were; what its rows would do to a slot is
recorded by whoever ran it. One number of kept rows, given once for each slot, then moves every
layer. Rows that are dropped leave nothing behind: the state is still the one from before the step,
and the MLA rows lie behind the request's length. Knows no tensors: ``apply`` moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


class UncommittedError(RuntimeError):
    """A step was to run before the rows of the last verify step were committed or dropped."""


@dataclass(frozen=True)
class OpenSpan:
    """The rows [first, first + count) of a step, of one slot, whose caches held start tokens."""

    slot: int
    start: int
    first: int
    count: int


@dataclass(frozen=True)
class KeptRows:
    """The first ``kept`` of an open span's rows, which stay."""

    span: OpenSpan
    kept: int


def kept_lines(kept: Sequence[KeptRows], requests: int) -> list[tuple[int, int, int]]:
    """(slot, first row, rows that stay) of each, padded with lines of no rows to ``requests``."""
    lines = [(entry.span.slot, entry.span.first, entry.kept) for entry in kept]
    return lines + [(0, 0, 0)] * (requests - len(lines))


# Moves the slots, in every layer.
Apply = Callable[[Sequence[KeptRows]], None]


class OpenRows:
    """At most one step's rows are open at a time."""

    def __init__(self) -> None:
        self._open: dict[int, OpenSpan] = {}
        self._apply: Apply | None = None

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(self._open)

    def require_none(self) -> None:
        """Raises UncommittedError before a step that would start from an undecided state."""
        if self._open:
            raise UncommittedError(
                f"Rows of the KDA slots {sorted(self._open)} were verified and neither committed "
                "nor dropped; no step can run before that."
            )

    def open(self, spans: Sequence[OpenSpan], apply: Apply) -> None:
        """A verify step is about to run. apply: called with what is kept of it."""
        self.require_none()
        self._open = {span.slot: span for span in spans}
        self._apply = apply

    def drop(self, slot: int) -> None:
        """The rows of a slot never happened: its request has ended. Nothing for other slots."""
        self._open.pop(slot, None)

    def commit(self, kept: Mapping[int, int]) -> dict[int, int]:
        """See `Caches.commit`."""
        rows = []
        for slot, count in kept.items():
            span = self._open.get(slot)
            if span is None:
                raise ValueError(
                    f"{count} rows of KDA slot {slot} are to be kept; slots with open rows are "
                    f"{sorted(self._open)}."
                )
            if not 1 <= count <= span.count:
                raise ValueError(
                    f"{count} rows of KDA slot {slot} cannot be kept; the step ran {span.count}, "
                    "and the first of them always stays."
                )
            rows.append(KeptRows(span, count))
        if rows:
            assert self._apply is not None
            self._apply(rows)
        for slot in kept:
            del self._open[slot]
        return {row.span.slot: row.span.start + row.kept for row in rows}
