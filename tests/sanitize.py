"""Runs tests with the native module built by a sanitizer of the compiler.

    python tests/sanitize.py address [pytest arguments]
    python tests/sanitize.py thread [pytest arguments]

Without arguments: the kernels' and plans' tests for `address`, those of the thread pool and of the
fused steps that run on it for `thread`. Needs GCC and what `pip install --no-build-isolation -e .`
needs; the build is kept in `build/sanitize-KIND`. The sanitizer's runtime has to be in the process
before Python is, so that the tests run in a child with LD_PRELOAD. Leaks are not looked for: Python
and torch keep memory until the end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE = "kdecode.kernels.common._native"
SUITES = {
    "address": [
        "tests/kernels",
        "tests/decode/test_latency_specialized.py",
        "tests/decode/test_verify_plan.py",
        "tests/decode/test_draft_specialized.py",
        "tests/decode/test_latency_ranks.py",
        "tests/parallel/test_shared.py",
    ],
    "thread": [
        "tests/kernels/common",
        "tests/kernels/kda_front",
        "tests/kernels/kda_commit",
        "tests/kernels/mla_front",
        "tests/kernels/moe_front",
        "tests/kernels/moe_tail",
        "tests/kernels/dense_mlp",
        "tests/kernels/attn_out",
        "tests/kernels/head",
        "tests/parallel/test_shared.py",
    ],
}
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"},
    # exitcode: of a run whose tests pass and in which something was reported.
    "thread": {"TSAN_OPTIONS": "exitcode=66:die_after_fork=0"},
}


def build(kind: str) -> Path:
    """The native module with this sanitizer."""
    import nanobind

    folder = ROOT / "build" / f"sanitize-{kind}"
    subprocess.run(
        [
            *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
            f"-DKD_SANITIZE={kind}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        ],
        check=True,
    )
    subprocess.run(["cmake", "--build", folder], check=True)
    (module,) = folder.glob("_native*.so")
    return module


def run_tests(module: Path, arguments: list[str]) -> int:
    """In the child: pytest, with this native module in place of the installed one."""
    import pytest

    # First, as in kernels/common/native.py: its OpenMP runtime is the one that is shared.
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(MODULE, module)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules[MODULE] = native
    # Pytest's capture would hide a report that ends the process; instrumented loads are slow.
    return int(pytest.main(["-q", "-x", "-s", "-k", "not is_timed", *arguments]))


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in SUITES:
        print(__doc__, file=sys.stderr)
        return 2
    kind, arguments = sys.argv[1], sys.argv[2:] or SUITES[sys.argv[1]]
    if "KD_SANITIZED_MODULE" in os.environ:
        return run_tests(Path(os.environ["KD_SANITIZED_MODULE"]), arguments)
    # libstdc++, too, because the runtime looks for what it wraps before Python has loaded any.
    libraries = [{"address": "libasan.so", "thread": "libtsan.so"}[kind], "libstdc++.so.6"]
    paths = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in libraries
    ]
    environment = {
        **os.environ,
        **OPTIONS[kind],
        "LD_PRELOAD": ":".join(paths),
        "KD_SANITIZED_MODULE": str(build(kind)),
    }
    command = [sys.executable, __file__, kind, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
