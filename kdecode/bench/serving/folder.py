"""A comparison of servers as a folder of files: for people, for programs, for other tools.

Owns which files there are. The texts of replies are not kept, their digests are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kdecode.bench.machine import Machine
from kdecode.bench.serving import exports, report
from kdecode.bench.serving.protocol import ServedComparison
from kdecode.bench.serving.report_html import render_html
from kdecode.bench.serving.stored import document_of
from kdecode.bench.tables import plain

# Of an arm by its name, the forms of other tools.
EXPORTS = ("vllm-bench-{}.json", "aiperf-{}.jsonl", "llm-d-{}.json")


def write_folder(folder: Path, comparison: ServedComparison, machine: Machine) -> list[Path]:
    """Writes everything, and returns the files. Raises OSError."""
    (folder / "exports").mkdir(parents=True, exist_ok=True)
    texts: dict[str, Callable[[], str]] = {
        "report.md": lambda: render_markdown(comparison, machine),
        "report.html": lambda: render_html(comparison, machine),
        "comparison.json": lambda: _json(document_of(comparison, machine)),
        "requests.jsonl": lambda: _lines(requests(comparison)),
    }
    written = []
    for name, make in texts.items():
        written.append(folder / name)
        written[-1].write_text(make(), encoding="utf-8")
    for arm, name in enumerate(comparison.arm_names):
        forms = (
            _json(exports.vllm_bench(comparison, arm, machine)),
            _lines(exports.aiperf_records(comparison, arm)),
            _json(exports.llm_d_report(comparison, arm, machine)),
        )
        for pattern, text in zip(EXPORTS, forms, strict=True):
            written.append(folder / "exports" / pattern.format(name))
            written[-1].write_text(text, encoding="utf-8")
    return written


def requests(comparison: ServedComparison) -> Iterator[dict[str, Any]]:
    """Every measured request with its chunks, in the order of the passes."""
    for one in comparison.passes:
        for record in one.result.records:
            reply = record.reply
            yield {
                "comparison_id": comparison.comparison_id,
                "arm": comparison.arm_names[one.arm],
                "block": one.block,
                "pair": one.pair,
                "request_id": record.request_id,
                "session": record.session,
                "turn": record.turn,
                "send_ns": record.send_ns,
                "end_ns": record.end_ns,
                "error": record.error,
                "timing": plain(record.timing),
                "metrics": plain(record.metrics()),
                "token_source": None if reply is None else reply.token_source,
                "prompt_tokens": None if reply is None else reply.prompt_tokens,
                "cached_tokens": None if reply is None else reply.cached_tokens,
                "finish_reason": None if reply is None else reply.finish_reason,
                "text_sha256": (
                    None if reply is None else hashlib.sha256(reply.text.encode()).hexdigest()
                ),
            }


def render_markdown(comparison: ServedComparison, machine: Machine) -> str:
    """The report as Markdown, with the same sections and words as the terminal's."""
    baseline, candidate = comparison.arm_names
    parts = [f"# {candidate} against {baseline}: {comparison.verdict}"]
    parts.append(_bullets("Verdict", report.verdict_lines(comparison)))
    parts.append(_bullets("Ratios", report.ratio_lines(comparison)))
    for table in report.tables(comparison):
        rows = [("", *table.arms, "how"), ("---",) * (len(table.arms) + 2), *table.rows]
        lines = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
        banner = "" if table.banner is None else f"**{table.banner}**\n\n"
        parts.append(f"## {table.title}\n\n{banner}{lines}")
    parts.append(_bullets("Coverage", report.coverage_lines(comparison)))
    parts.append(_bullets("Outputs", report.output_lines(comparison)))
    parts.append(_bullets("What was measured", report.header_lines(comparison, machine)))
    formulas = [f"`{name}`: {formula}" for name, formula in report.formulas().items()]
    parts.append(_bullets("How the numbers were obtained", formulas))
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(name: str, lines: list[str]) -> str:
    return f"## {name}\n\n" + "\n".join(f"* {line.strip()}" for line in lines) if lines else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _lines(documents: Iterator[Any]) -> str:
    return "".join(json.dumps(document, allow_nan=False) + "\n" for document in documents)
