"""A comparison of servers as plain JSON values, and what may be read out of two of them.

Owns the schema of `comparison.json`. A ratio belongs to one comparison: figures of two of them are
refused, because their machines had other moods.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdecode.bench.machine import Machine
from kdecode.bench.serving.counters import ServerCounts
from kdecode.bench.serving.protocol import ServedComparison
from kdecode.bench.serving.report import formulas
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.tables import plain


class StoredError(ValueError):
    """A stored comparison that cannot be used; the message says which and why."""


class RefusedRatioError(StoredError):
    """A ratio that belongs to no comparison."""


SCHEMA = "kdecode.served_comparison"
SCHEMA_VERSION = 1


def document_of(comparison: ServedComparison, machine: Machine) -> dict[str, Any]:
    """Everything but the requests' contents, which the workload's digest stands for."""
    fields = {
        field.name: plain(getattr(comparison, field.name))
        for field in dataclasses.fields(comparison)
        if field.name not in ("passes", "workload")
    }
    for summary, one in zip(fields["summaries"], comparison.summaries, strict=True):
        summary["counts"] = counts_of(one.counts)
    workload = comparison.workload
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "exit_code": comparison.exit_code,
        "kinds": [facts.study for facts in comparison.facts],
        "outputs_valid": comparison.outputs_valid,
        "formulas": formulas(),
        "machine": plain(machine),
        "workload": {
            "name": workload.name,
            "digest": workload.digest,
            "reply_mode": workload.reply_mode,
            "requests": len(workload.requests),
            "sessions": len(workload.sessions()),
        },
        "passes": [
            {
                "block": one.block,
                "pair": one.pair,
                "arm": one.arm,
                "begin_ns": one.result.begin_ns,
                "end_ns": one.result.end_ns,
                "planned": one.result.planned,
                "completed": one.result.completed,
            }
            for one in comparison.passes
        ],
        **fields,
    }


def counts_of(counts: ServerCounts) -> dict[str, Any]:
    """A server's counts with what follows from them."""
    return {
        **plain(counts),
        "coverage": counts.coverage,
        "acceptance_length": counts.acceptance_length,
        "acceptance_rate": counts.acceptance_rate,
        "derived_tpot_s": counts.derived_tpot_s,
    }


def read_document(path: Path) -> Mapping[str, Any]:
    """A comparison that `document_of` made. Raises StoredError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoredError(f"{path} is no stored comparison: {error}") from error
    found = document.get("schema") if isinstance(document, Mapping) else None
    if found != SCHEMA or document.get("schema_version") != SCHEMA_VERSION:
        raise StoredError(f"{path} is no comparison of servers, version {SCHEMA_VERSION}.")
    return document


def ratio_of(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> RatioEstimate:
    """The ratio of arm a of one document and arm b of another: they have to be one comparison.

    Raises RefusedRatioError.
    """
    ids = [document["comparison_id"] for document in (baseline, candidate)]
    if ids[0] != ids[1]:
        raise RefusedRatioError(
            f"refused: the values are of the comparisons {ids[0]} and {ids[1]}, and a ratio "
            "belongs to one comparison."
        )
    found = baseline["ratios"].get("tpot")
    if found is None:
        raise RefusedRatioError(
            f"refused: the comparison {ids[0]} has no ratio; its verdict is "
            f"{baseline['verdict']!r}."
        )
    return estimate_of(found)


def estimate_of(stored: Mapping[str, Any]) -> RatioEstimate:
    return RatioEstimate(**{**stored, "blocks": tuple(stored["blocks"])})
