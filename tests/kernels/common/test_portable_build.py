"""The portable kernels compile for another architecture, without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "kdecode" / "kernels"
COMPILER = "aarch64-linux-gnu-g++"
# Those that bind to Python need that architecture's Python.
SOURCES = sorted(
    path for path in KERNELS.glob("*/*.cpp") if path.name not in ("bind.cpp", "module.cpp")
)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_compiles_for_aarch64(source: Path, tmp_path: Path) -> None:
    command = [COMPILER, "-std=c++17", "-O2", "-fopenmp", "-Wall", "-Wextra", "-Werror"]
    command += ["-DKD_NS=portable", f"-I{KERNELS}", "-c", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "out.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
