"""`kdecode compare`: both backends in one process, same weights and prompts, measured in pairs.

Two servers by URL are `compare_servers`'s.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands import compare_flags, compare_servers
from kdecode.commands.common import (
    ProgressBar,
    add_engine_arguments,
    add_model_argument,
    add_rank_arguments,
    add_speculative_argument,
    check_output_file,
    context_tokens,
    engine_config,
    mebibytes,
    model_directory,
    open_model,
    positive,
    table,
    write_json,
)
from kdecode.config import DecodeBackend, EngineConfig
from kdecode.config_speculative import SpeculativeConfig

if TYPE_CHECKING:
    from kdecode.bench.compare import CompareSettings
    from kdecode.bench.engine_arm import EngineArm

HELP = "measure two decode backends, or two servers, against each other"
DESCRIPTION = (
    "With --speculative-config both backends are measured twice: plainly, and with drafts; the two "
    "are never in one table. "
    "Exit codes: 0 for a verdict about speed, 3 when the arms are not comparable, 4 when their "
    "outputs differ, 5 when the specialised path was not exercised."
)

# Logits of two correct backends differ by the roundings of every layer, and by an expert that
# changes place: by 2 to 3.5 % of their spread (RMS), so that two logits of one row move against
# each other by up to 4 sigma in about 5 % of the largest logit. docs/numerics.md has the
# calibration. A wrong backend misses by several units.
NEAR_TIE_ATOL = 0.0
NEAR_TIE_RTOL = 0.05
# Of a step with drafts: proposing them; the target's step and the verdicts; moving the caches.
_TIMES = ("draft_ns", "verify_ns", "commit_ns")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--prompts", type=positive, default=3, help="number of prompts")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--blocks", type=positive, default=6, help="2 or more")
    parser.add_argument(
        "--warmup-runs",
        nargs=2,
        type=int,
        default=(3, 10),
        metavar=("LEAST", "MOST"),
        help="discarded runs of an arm, between which its warm-up ends when times are stable",
    )
    parser.add_argument("--order", choices=("abba", "random"), default="abba")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, order and bootstrap")
    backends = get_args(DecodeBackend)
    parser.add_argument("--arm-a", choices=backends, default="auto", help="the baseline")
    parser.add_argument("--arm-b", choices=backends, default="latency_specialized")
    parser.add_argument("--near-tie-atol", type=float, default=NEAR_TIE_ATOL)
    parser.add_argument("--near-tie-rtol", type=float, default=NEAR_TIE_RTOL)
    parser.add_argument("--json", metavar="PATH", help="also write all of it to PATH; - is stdout")
    add_engine_arguments(parser, has_backend=False)
    add_rank_arguments(parser)
    add_speculative_argument(parser)
    compare_servers.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if compare_servers.is_asked_for(args):
        return compare_servers.run(args)
    from kdecode.bench.agreement import NearTie
    from kdecode.bench.compare import CompareSettings
    from kdecode.commands.common import InputError
    from kdecode.engine.preflight import check_deployment
    from kdecode.model.weights import CheckpointReader

    compare_flags.check_backends(args)
    try:
        settings = CompareSettings(
            max_tokens=args.output_tokens,
            near_tie=NearTie(args.near_tie_atol, args.near_tie_rtol),
            blocks=args.blocks,
            warmup_runs=tuple(args.warmup_runs),
            order=args.order,
            seed=args.seed,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    if args.trunk_format != "bf16":
        raise InputError(
            f"--trunk-format {args.trunk_format} makes other weights than the checkpoint's, so it "
            "is never part of a comparison; `kdecode check --trunk-format` says what it costs."
        )
    if args.json is not None:
        check_output_file(args.json)
    directory = model_directory(args)
    kinds = [None] if args.speculative_config is None else [None, args.speculative_config]
    configs = [_arm_configs(args, speculative) for speculative in kinds]
    # Before one arm is packed for nothing; auto last, because what it says a refusal says, too.
    every = [config for pair in configs for config in pair]
    for config in sorted(every, key=lambda config: config.decode_backend == "auto"):
        check_deployment(CheckpointReader(directory), config)
    # Where the document goes to stdout, nothing else does.
    report = sys.stderr if args.json == "-" else sys.stdout
    documents, codes = [], []
    plain_s: list[float | None] = []
    for pair in configs:
        found = _measure(args, directory, pair, settings, plain_s)
        plain_s = found.token_s
        print("\n".join(found.tables), file=report)
        documents.append(found.document)
        codes.append(found.exit_code)
    if args.json is not None:
        document = documents[0]
        if args.speculative_config is not None:
            document = dict(zip(("plain", "speculative"), documents, strict=True))
        write_json(document, args.json)
    # What keeps a ratio from being printed weighs more than one that was.
    return max(codes)


@dataclass(frozen=True)
class _Measured:
    """token_s: median time per token of each arm."""

    tables: list[str]
    token_s: list[float | None]
    document: dict[str, Any]
    exit_code: int


def _arm_configs(
    args: argparse.Namespace, speculative: SpeculativeConfig | None
) -> list[EngineConfig]:
    length = context_tokens(args.prompt_tokens + args.output_tokens)
    return [
        engine_config(
            args,
            decode_backend=backend,
            max_context_tokens=length,
            max_requests=1,
            speculative=speculative,
        )
        for backend in (args.arm_a, args.arm_b)
    ]


def _measure(
    args: argparse.Namespace,
    directory: Path,
    configs: list[EngineConfig],
    settings: CompareSettings,
    plain_s: list[float | None],
) -> _Measured:
    """One comparison of the two backends, in engines of its own.

    plain_s: time per token of each arm without drafts, where that has been measured.
    """
    from kdecode.bench.compare import compare
    from kdecode.bench.engine_arm import EngineArm
    from kdecode.bench.machine import read_machine
    from kdecode.bench.report import render, to_json

    with ExitStack() as opened:
        arms = [
            EngineArm(name, opened.enter_context(open_model(directory, config)))
            for name, config in zip(_names(args.arm_a, args.arm_b), configs, strict=True)
        ]
        bar = ProgressBar()
        comparison = compare(arms[0], arms[1], _prompts(arms[0], args), settings, bar.message)
        bar.clear()
        machine = read_machine()
        engines = [_engine_facts(arm) for arm in arms]
    tables = [render(comparison, machine), _engine_table(engines, configs[0].tensor_parallel_size)]
    if configs[0].speculative is not None:
        for engine, token_s in zip(engines, plain_s, strict=True):
            engine["break_even_length"] = _break_even(engine["speculation"], token_s)
        tables += ["", _rounds_table(engines, configs[0].speculative)]
    document = {**to_json(comparison, machine), "engines": engines}
    token_s = [None if s.tpot_s is None else s.tpot_s.p50 for s in comparison.summaries]
    return _Measured(tables, token_s, document, comparison.exit_code)


def _names(arm_a: str, arm_b: str) -> tuple[str, str]:
    return (arm_a, arm_b) if arm_a != arm_b else (f"{arm_a} (a)", f"{arm_b} (b)")


def _prompts(arm: EngineArm, args: argparse.Namespace) -> list[list[int]]:
    """Random ordinary tokens, the same for a seed: nothing in them is easy to guess or cached."""
    source = random.Random(args.seed)
    num_base = arm.llm.tokenizer.num_base
    return [
        [source.randrange(num_base) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)
    ]


def _engine_facts(arm: EngineArm) -> dict[str, Any]:
    stats = arm.llm.stats()
    return {
        "name": arm.name,
        **stats["build"],
        "packed_bytes": stats["packed_bytes"],
        "draft_bytes": stats["draft_bytes"],
        "cache_bytes": stats["cache_bytes"],
        "speculation": stats["speculation"],
    }


def _engine_table(engines: list[dict[str, Any]], ranks: int) -> str:
    """What each arm took to build and keeps in memory; each has its own packed weights. ranks: of
    several, one's share."""
    whose = "" if ranks == 1 else " of rank 0"
    rows = [("engine", "open", "pack", "prepare", f"packed weights{whose}", f"caches{whose}")]
    for engine in engines:
        rows.append(
            (
                engine["name"],
                f"{engine['open_s']:.2f} s",
                f"{engine['pack_s']:.2f} s",
                f"{engine['prepare_s']:.2f} s",
                mebibytes(engine["packed_bytes"]),
                mebibytes(engine["cache_bytes"]),
            )
        )
    return table(rows)


def _rounds_table(engines: list[dict[str, Any]], config: SpeculativeConfig) -> str:
    """What became of the drafts of each arm, warm-up included, and the time of its steps."""
    head = ("engine", "rounds", "tokens a round", "emitted", "accepted", "by place")
    rows = [(*head, "draft", "verify", "commit", "pays above")]
    for engine in engines:
        found = engine["speculation"]
        steps = max(found["steps"], 1)
        places = ["-" if rate is None else f"{rate:.2f}" for rate in found["rate_by_place"]]
        times = [f"{found[name] / steps / 1e6:.3f} ms" for name in _TIMES]
        rows.append(
            (
                engine["name"],
                str(found["rounds"]),
                _figure(found["acceptance_length"]),
                _figure(found["emitted_length"]),
                _figure(found["acceptance_rate"]),
                " ".join(places),
                *times,
                _figure(engine["break_even_length"]),
            )
        )
    text = table(rows)
    for engine in engines:
        least, found = engine["break_even_length"], engine["speculation"]["acceptance_length"]
        if least is not None and found is not None and found < least:
            text += (
                f"\n{engine['name']}: drafts do not pay: {found:.2f} tokens a round, and a round "
                f"takes as long as {least:.2f} tokens without drafts"
            )
    if config.is_synthetic:
        asked = 1 + sum(config.acceptance_rates())
        text += f"\nSYNTHETIC: {asked:.2f} tokens a round were asked for; texts are no answers"
    return text


def _break_even(found: dict[str, Any], token_s: float | None) -> float | None:
    """Tokens a round from which on drafts pay: its time, in tokens without drafts."""
    if token_s is None or not found["steps"]:
        return None
    return float(sum(found[name] for name in _TIMES) / found["steps"] / 1e9 / token_s)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
