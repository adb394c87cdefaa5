"""One figure of a stored comparison: its formula, what went into it, and what it came to.

Owns which values of `comparison.json` belong to a name of the formulas. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdecode.bench.serving.stored import StoredError, estimate_of
from kdecode.bench.tables import estimate_text

# Of a summary, the field of each name, and its unit: seconds, tokens a second, a share, a number.
_FIELDS: Mapping[str, tuple[str, str]] = {
    **{name: (f"{name}_s", "s") for name in ("ttft", "ttfa", "e2e", "tpot", "icl", "queue")},
    "n": ("output_tokens", "tokens"),
    "decode_tps_arm": ("decode_tps", "tok/s"),
    "decode_tps_steady": ("decode_tps_steady", "tok/s"),
    "output_tps_run": ("output_tps", "tok/s"),
    "peak_tps": ("peak_tps", "tok/s"),
    "prefill_tps_server": ("prefill_tps", "tok/s"),
    "goodput": ("goodput", "share"),
    "hit_rate": ("hit_rate", "share"),
}
_COUNTED: Mapping[str, tuple[str, str]] = {
    "coverage": ("coverage", "share"),
    "acceptance_length": ("acceptance_length", "tokens a round"),
    "acceptance_rate": ("acceptance_rate", "share"),
    "step_time": ("step_s", "s"),
    "derived_tpot": ("derived_tpot_s", "s"),
}


def explain(document: Mapping[str, Any], name: str) -> list[str]:
    """Lines about one name. Raises StoredError for a name that the comparison does not have."""
    formulas = document["formulas"]
    if name not in formulas:
        raise StoredError(f"{name!r} is no quantity of this comparison: {', '.join(formulas)}.")
    passes = document["passes"]
    lines = [f"{name} = {formulas[name]}"]
    if name == "derived_tpot":
        lines.append("DERIVED: of the server's mean step and its mean round; no request had it")
    for arm, label in enumerate(document["arm_names"]):
        summary = document["summaries"][arm]
        mine = [one for one in passes if one["arm"] == arm]
        lines.append(
            f"{label}: {_value(summary, name)}; {summary['completed']} of {summary['planned']} "
            f"requests in {len(mine)} passes; tokens counted by "
            f"{'; '.join(summary['token_sources']) or 'nobody'}"
        )
    warmups = [warmup["runs"] for warmup in document["warmups"]]
    lines.append(
        f"window: the passes of {document['design']['blocks']} blocks; {warmups[0]} and "
        f"{warmups[1]} passes of warm-up are not in it, nor is the null run"
    )
    found = document["ratios"].get(name)
    if found is not None:
        lines.append(f"ratio a / b: {estimate_text(name, estimate_of(found))}")
    elif name in ("tpot", "ttft", "e2e"):
        lines.append(f"no ratio: the verdict is {document['verdict']!r}")
    return lines


def _value(summary: Mapping[str, Any], name: str) -> str:
    if name in _FIELDS:
        field, unit = _FIELDS[name]
        value = summary[field]
    elif name in _COUNTED:
        field, unit = _COUNTED[name]
        value = summary["counts"][field]
    else:
        return "of a request, in requests.jsonl"
    if value is None:
        return "undefined, or not told by the server"
    if isinstance(value, Mapping):
        return (
            f"P50 {1e3 * value['p50']:.3f} ms, P90 {1e3 * value['p90']:.3f} ms of "
            f"{value['num_values']:,} values"
        )
    if unit == "s":
        return f"{1e3 * value:.3f} ms"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:,.2f} {unit}"
