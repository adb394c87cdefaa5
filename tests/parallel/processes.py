"""What tests ask about processes of the system, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_there(process: int, *, or_zombie: bool = True) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return or_zombie or state != "Z"


def until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)
