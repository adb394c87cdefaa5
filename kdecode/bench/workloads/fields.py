"""Values of entries that others wrote, checked before anything is made of them.

Owns which JSON is read and which numbers and lists an entry may have. Does not know formats: a
reader names the field, and where the entry stands for the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kdecode.bench.workloads.types import WorkloadError
from kdecode.config_json import shown

# More than any model's context; a length beside it is a mistake that would fill the memory.
MAX_TOKENS = 1 << 24
# Milliseconds since 1970 have 13 digits in this century.
MAX_NUMBER = 1e15


def parse_json(text: str) -> Any:
    """Raises ValueError, also for NaN and what nests too deep for Python's reader."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def number_of(entry: Mapping[str, Any], name: str, where: str) -> float:
    """0 where it is not given."""
    value: Any = entry.get(name) or 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_NUMBER:
        raise WorkloadError(
            f"{where}: {name} is {shown(value)}; a number from 0 to {MAX_NUMBER:g}."
        )
    return float(value)


def whole_of(entry: Mapping[str, Any], name: str, where: str, least: int = 0) -> int:
    """A number of tokens, which has to be given."""
    value: Any = entry.get(name)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= MAX_TOKENS:
        raise WorkloadError(
            f"{where}: {name} is {shown(value)}; a whole number from {least} to {MAX_TOKENS:,}."
        )
    return int(value)


def values_of(entry: Mapping[str, Any], name: str, where: str) -> tuple[Any, ...]:
    """A list; empty where it is not given."""
    value: Any = entry.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise WorkloadError(f"{where}: {name} is {shown(value)}, no list.")
    return tuple(value)


def objects_of(entry: Mapping[str, Any], name: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """A list of objects; empty where it is not given."""
    found = values_of(entry, name, where)
    for value in found:
        if not isinstance(value, Mapping):
            raise WorkloadError(f"{where}: {name} has {shown(value)}, which is no object.")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
