"""How numbers of things are written, in reports and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Ways in which processes share a model, as configurations name their sizes.
_SHARED = ("tensor", "pipeline", "data", "decode_context")


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ranks_text(config: Mapping[str, Any], prefix: str = "") -> str:
    """How several processes share the model, behind a comma each; "" where one has it alone.

    config: by dotted name, of which those that are meant begin with ``prefix``.
    """
    sizes = {what: config.get(f"{prefix}{what}_parallel_size", 1) for what in _SHARED}
    return "".join(
        f", {what.replace('_', ' ')} parallel {size}" for what, size in sizes.items() if size != 1
    )
