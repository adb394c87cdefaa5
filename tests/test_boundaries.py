"""The import rules of ARCHITECTURE.md, read from the source: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kdecode"

# Module prefix -> the kdecode modules it may import (prefixes).
RULES: dict[str, tuple[str, ...]] = {
    "config": ("config",),
    "model.reference": (
        "config",
        "model.parameters",
        "model.reference",
        "model.stages",
        "model.mxfp4",
    ),
    "model.draft_reference": (
        "config",
        "model.draft_parameters",
        "model.parameters",
        "model.reference",
    ),
    "model.stages": ("config",),
    "model.tokenizer": ("config_json",),
    "parallel": ("config", "kernels.common", "kernels.contract", "parallel"),
    "parallel.ranks": (),
    "parallel.context": ("parallel.ranks",),
    "cache": ("config", "cache"),
    "prefill": ("config", "model", "kernels.table", "kernels.contract", "cache", "prefill"),
    "speculative": ("config", "speculative", "decode", "prefill", "cache", "model"),
    "bench": ("bench", "config", "engine", "model.tokenizer"),
    "eval": ("config", "engine", "eval", "model.tokenizer"),
    "server": ("config", "engine", "model.chat", "model.tokenizer", "server"),
    "replicas": (
        "config",
        "commands.common",
        "commands.config_file",
        "commands.serve",
        "engine.async_engine",
        "replicas",
        "server",
    ),
    "engine": (
        "config",
        "engine",
        "speculative",
        "decode",
        "prefill",
        "cache",
        "model",
        "parallel",
        "testing",
    ),
}
# Values that anybody may hold.
ANYWHERE = ("parallel.ranks", "parallel.context")
# Modules that may import more than their package.
EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "bench.collectives": ("kernels.common", "kernels.exchange", "parallel"),
    "bench.kernel": ("kernels.common",),
    "bench.device": ("kernels.common",),
}
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "kernels": ("decode", "engine", "prefill", "bench", "model", "cache", "server"),
    "decode": ("engine", "bench", "cli", "speculative", "server"),
    "model": ("decode", "engine", "bench", "cache", "prefill", "cli", "speculative", "server"),
}


def _modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(PACKAGE).with_suffix("").parts), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def _imports(path: Path) -> set[str]:
    """kdecode modules that a file imports, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name.removeprefix("kdecode.") for name in found if name.startswith("kdecode.")}


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".") or name.startswith(prefix + "_")


@pytest.mark.parametrize(("module", "path"), _modules(), ids=lambda value: str(value))
def test_imports_follow_the_map(module: str, path: Path) -> None:
    for imported in _imports(path):
        for owner, allowed in RULES.items():
            if _is_under(module, owner) and imported in _package_modules():
                more = EXCEPTIONS.get(module, ())
                assert any(
                    _is_under(imported, prefix) for prefix in (*allowed, *more, *ANYWHERE)
                ), f"{module} imports {imported}; it may import {allowed}"
        for owner, banned in FORBIDDEN.items():
            if _is_under(module, owner):
                assert not any(_is_under(imported, prefix) for prefix in banned), (
                    f"{module} imports {imported}; {owner} must not"
                )


def _package_modules() -> set[str]:
    names = {name for name, _ in _modules()}
    return {name.removesuffix(".__init__") for name in names}


def test_an_op_imports_no_other_op() -> None:
    ops = {path.name for path in (PACKAGE / "kernels").iterdir() if (path / "op.py").exists()}
    for op in ops:
        for path in (PACKAGE / "kernels" / op).glob("*.py"):
            for imported in _imports(path):
                parts = imported.split(".")
                if parts[0] == "kernels" and len(parts) > 1 and parts[1] in ops:
                    assert parts[1] == op, f"{op} imports {imported}"


def test_a_rank_that_is_alone_needs_nothing_of_what_processes_are_made_of() -> None:
    """An engine, its commands and its server import none of it until ranks are asked for."""
    script = (
        "import sys, kdecode.engine.engine, kdecode.engine.async_engine, kdecode.commands.serve\n"
        "print([name for name in sys.modules if name.startswith('kdecode.parallel.')])"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.rsplit(".", 1)[1] for name in ast.literal_eval(found.stdout)}
    assert "ranks" in loaded
    assert not loaded & {"collectives", "followers", "group", "hosts", "launch"}


def test_config_needs_only_the_standard_library() -> None:
    names = set()
    for path in PACKAGE.glob("config*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
    # Which kdecode modules these may be is in RULES.
    assert names <= sys.stdlib_module_names | {"__future__", "kdecode"}


def test_environment_is_read_in_config_only() -> None:
    for module, path in _modules():
        if module == "config":
            continue
        text = path.read_text()
        assert not re.search(r"os\.environ|getenv", text), f"{module} reads the environment"
