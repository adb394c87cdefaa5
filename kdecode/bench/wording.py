"""How numbers of things are written, in reports and on the command line."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
