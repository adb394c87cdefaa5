"""`kdecode compare`: both backends in one process, same weights and prompts, measured in pairs."""

from __future__ import annotations

import argparse
import random
import sys
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands.common import (
    ProgressBar,
    add_engine_arguments,
    add_model_argument,
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
from kdecode.config import DecodeBackend

if TYPE_CHECKING:
    from kdecode.bench.engine_arm import EngineArm

HELP = "measure two decode backends against each other"
DESCRIPTION = (
    "Exit codes: 0 for a verdict about speed, 3 when the arms are not comparable, 4 when their "
    "outputs differ, 5 when the specialised path was not exercised."
)

# Logits of two correct backends differ by the roundings of every layer, and by an expert that
# changes place: by 2 to 3.5 % of their spread (RMS), so that two logits of one row move against
# each other by up to 4 sigma in about 5 % of the largest logit. docs/numerics.md has the
# calibration. A wrong backend misses by several units.
NEAR_TIE_ATOL = 0.0
NEAR_TIE_RTOL = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--prompts", type=positive, default=3, help="number of prompts")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--blocks", type=positive, default=6, help="2 or more")
    parser.add_argument("--order", choices=("abba", "random"), default="abba")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, order and bootstrap")
    backends = get_args(DecodeBackend)
    parser.add_argument("--arm-a", choices=backends, default="auto", help="the baseline")
    parser.add_argument("--arm-b", choices=backends, default="latency_specialized")
    parser.add_argument("--near-tie-atol", type=float, default=NEAR_TIE_ATOL)
    parser.add_argument("--near-tie-rtol", type=float, default=NEAR_TIE_RTOL)
    parser.add_argument("--json", metavar="PATH", help="also write all of it to PATH; - is stdout")
    add_engine_arguments(parser, has_backend=False)


def run(args: argparse.Namespace) -> int:
    from kdecode.bench.agreement import NearTie
    from kdecode.bench.compare import CompareSettings, compare
    from kdecode.bench.engine_arm import EngineArm
    from kdecode.bench.machine import read_machine
    from kdecode.bench.report import render, to_json
    from kdecode.commands.common import InputError
    from kdecode.engine.preflight import check_deployment
    from kdecode.model.weights import CheckpointReader

    try:
        settings = CompareSettings(
            max_tokens=args.output_tokens,
            near_tie=NearTie(args.near_tie_atol, args.near_tie_rtol),
            blocks=args.blocks,
            order=args.order,
            seed=args.seed,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    if args.json is not None:
        check_output_file(args.json)
    directory = model_directory(args)
    length = context_tokens(args.prompt_tokens + args.output_tokens)
    configs = [
        engine_config(args, decode_backend=backend, max_context_tokens=length, max_requests=1)
        for backend in (args.arm_a, args.arm_b)
    ]
    # Before one arm is packed for nothing; auto last, because what it says a refusal says, too.
    for config in sorted(configs, key=lambda config: config.decode_backend == "auto"):
        check_deployment(CheckpointReader(directory), config)
    arms = [
        EngineArm(name, open_model(directory, config))
        for name, config in zip(_names(args.arm_a, args.arm_b), configs, strict=True)
    ]
    prompts = _prompts(arms[0], args)
    bar = ProgressBar()
    comparison = compare(arms[0], arms[1], prompts, settings, bar.message)
    bar.clear()
    machine = read_machine()
    # Where the document goes to stdout, nothing else does.
    report = sys.stderr if args.json == "-" else sys.stdout
    print(render(comparison, machine), file=report)
    engines = [_engine_facts(arm) for arm in arms]
    print(_engine_table(engines), file=report)
    if args.json is not None:
        write_json({**to_json(comparison, machine), "engines": engines}, args.json)
    return comparison.exit_code


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
        "cache_bytes": stats["cache_bytes"],
    }


def _engine_table(engines: list[dict[str, Any]]) -> str:
    """What each arm took to build and keeps in memory; each has its own packed weights."""
    rows = [("engine", "open", "pack", "prepare", "packed weights", "caches")]
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
