"""The committed tables of what compiled kernels take: registers, spilled bytes, shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdecode.commands.common import table
from kdecode.config import environment
from kdecode.kernels.common.triton_compile import SHARED_LIMITS

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ResourceTable:
    """program: of this folder, which compiles cases and prints what their kernels take. case: what
    the parts of a case's name are. spills: why a kernel spills registers, by name; without a reason
    none may. update: the command that writes the table."""

    path: Path
    program: str
    case: str
    spills: Mapping[str, str]
    update: str

    def compile(self, cases: Sequence[str]) -> dict[str, Any]:
        """In a process whose Triton is no interpreter; kdecode's cache folder keeps results."""
        variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        variables["PYTHONPATH"] = str(_FOLDER.parent / "model")
        folder = environment().cache_dir / "compiled"
        command = [sys.executable, _FOLDER / self.program, folder, *cases]
        run = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert run.returncode == 0, run.stderr
        found: dict[str, Any] = json.loads(run.stdout)
        return found

    def write(self, found: Mapping[str, Any]) -> None:
        head = ("kernel", "tile", self.case, "registers", "spilled", "shared")
        text = f"{_title(found)}\n{table([head, *_rows(found)])}\n"
        self.path.write_text(text, encoding="utf-8")

    def check(self, found: Mapping[str, Any], cases: Sequence[str]) -> None:
        """Nothing spills without a reason or takes more than there is; the table has ``cases``, and
        figures are its own of the same Triton."""
        for line in found["lines"]:
            assert line["shared_bytes"] <= SHARED_LIMITS[line["case"].split("/")[0]], line
            assert line["stack_bytes"] == 0 or line["kernel"] in self.spills, line
        title, _, *lines = self.path.read_text(encoding="utf-8").splitlines()
        committed = {
            tuple(cell.strip() for cell in line.split("  ") if cell.strip()) for line in lines
        }
        assert {*cases} <= {row[2] for row in committed}
        if _title(found) == title:
            assert set(_rows(found)) <= committed, f"If it is meant: {self.update}"


def _title(found: Mapping[str, Any]) -> str:
    return f"Triton {found['triton']}; registers and spilled bytes a thread, shared bytes a program"


def _rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for line in found["lines"]:
        taken = (line["registers"], line["stack_bytes"], line["shared_bytes"])
        rows.append((line["kernel"], line["tile"], line["case"], *map(str, taken)))
    return sorted(rows)
