"""`kdecode eval`: how good a checkpoint's answers are, by backend and type of cache.

Owns the arguments, the arms that are compared, and what is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands.common import (
    InputError,
    ProgressBar,
    add_engine_arguments,
    add_model_argument,
    add_rank_arguments,
    engine_config,
    model_directory,
    open_model,
    positive,
    read_prompt_file,
    table,
    write_json,
)
from kdecode.config import CacheDtype, DecodeBackend, EngineConfig

if TYPE_CHECKING:
    from kdecode.engine.engine import LLM
    from kdecode.eval.text import TextScore

HELP = "perplexity of a text and needle items, by backend"
DESCRIPTION = (
    "Everything that is scored is the result of decode steps, so that each figure is the backend's "
    "own. Texts are the caller's."
)
_PROMPT_ROOM = 128  # tokens of a needle item beside its filler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="WHAT", required=True)
    text = parts.add_parser("text", help="bits per byte and perplexity of a text")
    needles = parts.add_parser("needles", help="a key asked for again from so many tokens back")
    for part, run in ((text, _run_text), (needles, _run_needles)):
        add_model_argument(part)
        part.add_argument("--text", required=True, metavar="PATH", help="a UTF-8 text")
        part.add_argument(
            "--decode-backend",
            choices=get_args(DecodeBackend),
            action="append",
            help="only this one; repeatable; default: both",
        )
        part.add_argument(
            "--cache-dtypes",
            choices=get_args(CacheDtype),
            nargs="+",
            metavar="DTYPE",
            help="several types of cache, instead of --cache-dtype",
        )
        part.add_argument("--json", metavar="PATH", help="one JSON document, - for stdout")
        add_engine_arguments(part, has_backend=False)
        add_rank_arguments(part)
        part.set_defaults(evaluate=run)
    text.add_argument(
        "--max-tokens", type=positive, default=8192, help="of the text, from its start"
    )
    text.add_argument("--window-tokens", type=positive, default=512)
    needles.add_argument("--distances", type=positive, nargs="+", default=[500, 2000])
    needles.add_argument("--items", type=positive, default=20, help="of each distance")
    needles.add_argument("--seed", type=int, default=0, help="of the items")


def run(args: argparse.Namespace) -> int:
    document, lines = args.evaluate(args)
    if args.json != "-":
        print(lines)
    if args.json is not None:
        write_json(document, args.json)
    return 0


@dataclass(frozen=True)
class _Arm:
    backend: DecodeBackend
    cache_dtype: CacheDtype


def _arms(args: argparse.Namespace) -> list[_Arm]:
    backends = args.decode_backend or get_args(DecodeBackend)
    dtypes = args.cache_dtypes or [args.cache_dtype]
    return [_Arm(backend, dtype) for dtype in dtypes for backend in backends]


def _each_arm(
    args: argparse.Namespace, max_context_tokens: int, evaluate: Callable[[LLM, Path], Any]
) -> list[tuple[_Arm, Any, float | None]]:
    """What ``evaluate`` says of an engine of each arm, and the engine's coverage."""
    if args.cache_scale is not None and all(arm.cache_dtype != "fp8" for arm in _arms(args)):
        raise InputError("--cache-scale is of an fp8 cache; none of the caches is fp8.")
    directory, results = model_directory(args), []
    for arm in _arms(args):
        settings = {
            "decode_backend": arm.backend,
            "cache_dtype": arm.cache_dtype,
            "cache_scale": args.cache_scale if arm.cache_dtype == "fp8" else None,
            "max_context_tokens": max_context_tokens,
            "max_requests": 1,
        }
        with open_model(directory, engine_config(args, **settings)) as llm:
            results.append((arm, evaluate(llm, directory), llm.stats()["coverage"]))
    return results


def _run_text(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.eval.text import score_text

    text, bar = read_prompt_file(args.text), ProgressBar()
    if args.window_tokens < 2:
        raise InputError("--window-tokens is 1; a window has at least 2 tokens.")

    def evaluate(llm: LLM, directory: Path) -> TextScore:
        ids = llm.tokenizer.encode_text(text)[: args.max_tokens]
        if len(ids) < 2:
            raise InputError(f"{args.text} has fewer than 2 tokens.")
        return score_text(llm, ids, args.window_tokens, lambda *done: bar("text", *done))

    results = _each_arm(args, max(EngineConfig().max_context_tokens, args.window_tokens), evaluate)
    bar.clear()
    first: TextScore = results[0][1]
    rows = [("backend", "cache", "bits per byte", "perplexity", "against the first", "coverage")]
    for arm, score, coverage in results:
        change = score.perplexity / first.perplexity - 1
        rows.append(
            (
                arm.backend,
                arm.cache_dtype,
                f"{score.bits_per_byte:.5f}",
                f"{score.perplexity:.4f}",
                f"{change:+.2e}",
                _percent(coverage),
            )
        )
    title = (
        f"{first.num_tokens:,} tokens ({first.num_bytes:,} bytes) of {args.text}, windows of "
        f"{args.window_tokens:,} tokens, each token scored by a decode step of one row"
    )
    document = {
        "text": args.text,
        "window_tokens": args.window_tokens,
        "arms": [
            asdict(arm)
            | asdict(score)
            | {"bits_per_byte": score.bits_per_byte, "perplexity": score.perplexity}
            | {"coverage": coverage}
            for arm, score, coverage in results
        ],
    }
    return document, f"{title}\n{table(rows)}"


def _run_needles(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.eval.needles import find, make_items

    text, bar = read_prompt_file(args.text), ProgressBar()
    # A token has at least one byte.
    if len(text.encode()) < max(args.distances):
        raise InputError(
            f"{args.text} has {len(text.encode()):,} bytes; filler of {max(args.distances):,} "
            "tokens cannot be cut from it."
        )

    def evaluate(llm: LLM, directory: Path) -> list[int]:
        ids, counts = llm.tokenizer.encode_text(text), []
        for distance in args.distances:
            try:
                items = make_items(llm.tokenizer, ids, distance, args.items, args.seed)
            except ValueError as error:
                raise InputError(str(error)) from error
            counts.append(sum(find(llm, items, lambda *done: bar("needles", *done))))
        return counts

    # Filler that was cut from a text may have other tokens around its ends.
    most = 2 * max(args.distances) + _PROMPT_ROOM
    results = _each_arm(args, max(EngineConfig().max_context_tokens, most), evaluate)
    bar.clear()
    heads = [f"{distance:,} tokens back" for distance in args.distances]
    rows: list[Sequence[str]] = [("backend", "cache", *heads)]
    for arm, counts, _ in results:
        rows.append((arm.backend, arm.cache_dtype, *(f"{n} of {args.items}" for n in counts)))
    document = {
        "text": args.text,
        "items": args.items,
        "seed": args.seed,
        "distances": args.distances,
        "arms": [asdict(arm) | {"found": counts} for arm, counts, _ in results],
    }
    return document, f"keys found, greedy, exact\n{table(rows)}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
