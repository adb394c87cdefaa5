"""Facts about the machine and the software that a measurement belongs to.

Owns reading them from the operating system. A fact that cannot be read is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from kdecode.engine.hardware import cpu_fields, cpu_name

# The instruction set extensions that decide which native kernels can run, widest first.
_CPU_FLAGS = ("avx512_bf16", "avx512f", "avx2", "fma")
_PACKAGES = ("kdecode", "torch", "numpy", "tiktoken")


@dataclass(frozen=True)
class Machine:
    """cores: logical cores that this process may use. cpu_flags: those of `_CPU_FLAGS` it has."""

    cpu: str | None
    cores: int
    cpu_flags: tuple[str, ...]
    system: str
    date: str
    versions: Mapping[str, str]
    peak_rss_bytes: int


def read_machine() -> Machine:
    """Call it after the measurement: the peak resident size is that of the process until now."""
    cpuinfo = cpu_fields()
    flags = cpuinfo.get("flags", "").split()
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Machine(
        cpu=cpu_name(cpuinfo),
        cores=_usable_cores(),
        cpu_flags=tuple(flag for flag in _CPU_FLAGS if flag in flags),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        # Linux counts in KiB, macOS in bytes.
        peak_rss_bytes=peak if sys.platform == "darwin" else peak * 1024,
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
