"""Which hardware serves a model, as far as the operating system tells.

Owns reading it. A fact that cannot be read is None, never a guess.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch


def hardware(device: str, num_ranks: int = 1) -> dict[str, Any]:
    """Model and number of the devices behind `device`; a CPU counts as one.

    num_ranks: that share a model, on CUDA a device each.
    """
    if torch.device(device).type == "cuda":
        return {"name": torch.cuda.get_device_name(device), "count": num_ranks}
    return {"name": cpu_name(cpu_fields()), "count": 1}


def cpu_name(fields: dict[str, str]) -> str | None:
    return fields.get("model name") or platform.processor() or None


def cpu_fields(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What is told of the first processor; empty where the file does not exist."""
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    fields = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in fields}
