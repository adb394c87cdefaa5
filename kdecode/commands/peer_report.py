"""What `kdecode bench peers` found, as a document and as text.

Owns which pairs of arms get a ratio and every line that is printed. Measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kdecode.commands.common import table

if TYPE_CHECKING:
    from kdecode.bench.peer_arms import Work
    from kdecode.bench.peers import Divergence, PeerArm, PeerRun
    from kdecode.commands.bench_peers import Entrants, Source
    from kdecode.commands.peer_files import Files


@dataclass(frozen=True)
class Section:
    """Every arm's runs of one work."""

    work: Work
    arms: Sequence[PeerArm]
    runs: Sequence[PeerRun]


def document(
    args: argparse.Namespace,
    files: Files,
    entrants: Entrants,
    sections: Sequence[Section],
    agreement: Divergence | None,
) -> dict[str, Any]:
    """Decoding has one section, whose figures stand at the top; prompts have one a length."""
    from kdecode.bench.compiled_arm import CompiledArm
    from kdecode.bench.machine import read_machine

    sources, last = entrants.sources, sections[-1]
    arms = [
        {
            "name": arm.name,
            "version": arm.version,
            "keeps_weights": arm.keeps_weights,
            "precision": dict(arm.precision),
            "settings": dict(arm.settings),
            "compiled": arm.facts() if isinstance(arm, CompiledArm) else None,
            "divergence": None if source.divergence is None else asdict(source.divergence),
        }
        for arm, source in zip(last.arms, sources, strict=True)
    ]
    found: dict[str, Any] = {
        "measure": args.measure,
        "model": {
            "name": files.directory.resolve().name,
            "type": files.config.model_type,
            "layers": files.config.num_layers,
            "weights_digest": files.digest,
        },
        "threads": last.work.threads,
        "blocks": args.blocks,
        "seed": args.engine_seed,
        "agreement": None if agreement is None else asdict(agreement),
        "arms": arms,
        "left_out": entrants.left_out,
        "machine": asdict(read_machine()),
    }
    parts = [_figures(section, sources, agreement, args.engine_seed) for section in sections]
    if args.measure == "prompt":
        lengths = [section.work.context_tokens for section in sections]
        found["lengths"] = [
            {"prompt_tokens": tokens, **part} for tokens, part in zip(lengths, parts, strict=True)
        ]
        return found
    (part,) = parts
    work = last.work
    sizes = {
        "rows": work.rows,
        "context_tokens": work.context_tokens,
        "output_tokens": work.output_tokens,
    }
    for arm, speed in zip(arms, part.pop("tokens_per_second"), strict=True):
        arm["tokens_per_second"] = speed
    return {**found, **sizes, **part}


def _figures(
    section: Section, sources: Sequence[Source], agreement: Divergence | None, seed: int
) -> dict[str, Any]:
    from kdecode.bench.peers import peer_ratio, refusal, typical_speed, used_pairs

    arms, runs, ratios = section.arms, section.runs, []
    num_ours = sum(source.is_ours for source in sources)
    for ours in range(num_ours):
        for peer in range(ours + 1, len(arms)):
            needs_check = sources[peer].needs_check
            reason = refusal(arms[ours], arms[peer], agreement, needs_check=needs_check)
            estimate = None if reason else asdict(peer_ratio(runs, ours, peer, seed))
            ratios.append(
                {
                    "ours": arms[ours].name,
                    "peer": arms[peer].name,
                    "refusal": reason,
                    "estimate": estimate,
                    "has_spoilt_pairs": None if reason else used_pairs(runs, ours, peer)[1],
                }
            )
    return {
        "tokens_per_second": [typical_speed(runs, number) for number in range(len(arms))],
        "runs": [{**asdict(run), "is_spoilt": run.is_spoilt} for run in runs],
        "ratios": ratios,
    }


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text."""
    yield from _head(found)
    agreement = found["agreement"]
    if agreement is not None:
        yield (
            f"logits of llama.cpp on F32 weights against the fp32 reference, "
            f"{agreement['positions']} positions: KL {agreement['mean']:.1e} nats (largest "
            f"{agreement['largest']:.1e}), {agreement['same_choice']} same choices"
        )
    yield ""
    yield table(_speeds(found))
    yield ""
    arms = found["arms"]
    classes = list(dict.fromkeys(label for arm in arms for label in arm["precision"]))
    head = ("held in (x: input of the product)", *(arm["name"] for arm in arms))
    lines = [(label, *(arm["precision"].get(label, "-") for arm in arms)) for label in classes]
    yield table([head, *lines])
    yield ""
    for arm in arms:
        settings = ", ".join(f"{name} {value}" for name, value in arm["settings"].items())
        yield f"{arm['name']}: {settings or 'no settings known'}"
    for entry in found["left_out"]:
        yield f"{entry['name']}: not measured. {entry['reason']}"
    yield ""
    for part in found.get("lengths", [found]):
        tokens = part.get("prompt_tokens")
        for ratio in part["ratios"]:
            yield ("" if tokens is None else f"{tokens:,} tokens: ") + _ratio(ratio)


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    model, machine = found["model"], found["machine"]
    if found["measure"] == "prompt":
        yield (
            "prompt tokens a second of one request: tokens of the prompt / time until the first "
            "token of the reply is known"
        )
    else:
        yield (
            f"decoded tokens a second, prefill in none: {_count(found['rows'], 'request')} at a "
            f"time, {found['context_tokens']:,} tokens of context, {found['output_tokens']} tokens "
            "a run"
        )
    yield (
        f"{found['blocks']} blocks of two runs of every arm, forwards and backwards, after one of "
        f"each that is thrown away; {_count(found['threads'], 'thread')}; seed of the intervals "
        f"{found['seed']}"
    )
    yield (
        f"{model['name']}: {model['type']}, {model['layers']} layers, weights "
        f"{model['weights_digest']}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    flags = " ".join(machine["cpu_flags"])
    yield f"{machine['cpu']}, {machine['cores']} cores, {flags}; {machine['system']}"
    yield f"{machine['date']}; {versions}"


def _speeds(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    parts = found.get("lengths", [found])
    heads = [
        "tok/s" if "prompt_tokens" not in part else f"{part['prompt_tokens']:,} tokens, tok/s"
        for part in parts
    ]
    rows = [("engine", *heads, "spoilt runs", "weights", "KL, nats", "version")]
    for number, arm in enumerate(found["arms"]):
        mine = [run for part in parts for run in part["runs"] if run["arm"] == number]
        speeds = [
            part["tokens_per_second"][number] if "lengths" in found else arm["tokens_per_second"]
            for part in parts
        ]
        rows.append(
            (
                arm["name"],
                *(f"{speed:.2f}" for speed in speeds),
                f"{sum(run['is_spoilt'] for run in mine)} of {len(mine)}",
                "as released" if arm["keeps_weights"] else "DIFFER FROM THE CHECKPOINT",
                "-" if arm["divergence"] is None else f"{arm['divergence']['mean']:.1e}",
                arm["version"],
            )
        )
    return rows


def _ratio(ratio: Mapping[str, Any]) -> str:
    pair = f"{ratio['ours']} / {ratio['peer']}"
    found = ratio["estimate"]
    if found is None:
        return f"{pair}: no ratio, {ratio['refusal']}"
    spoilt = ", SPOILT ONES AMONG THEM" if ratio["has_spoilt_pairs"] else ""
    return (
        f"{pair}: {found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}], "
        f"{found['num_pairs']} pairs in {found['num_blocks']} blocks{spoilt}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
