"""Prometheus texts of several replicas as one.

Owns only the format. The replicas' samples differ in a label already, so that none is added up.
"""

from __future__ import annotations

from collections.abc import Iterable


def merged(texts: Iterable[str]) -> str:
    """One text with each metric once, and all samples of it."""
    families: dict[str, list[str]] = {}
    samples: list[str] = []
    for text in texts:
        for line in text.splitlines():
            if line.startswith("# HELP "):
                samples = families.setdefault(line, [])
            elif not line.startswith("# TYPE ") or line not in samples:
                samples.append(line)
    return "".join(f"{line}\n" for head, lines in families.items() for line in (head, *lines))
