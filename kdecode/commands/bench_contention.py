"""`kdecode bench contention`: decoding beside a process that computes on one of its cores."""

from __future__ import annotations

import argparse
from typing import Any

from kdecode.commands import bench_layer
from kdecode.commands.common import add_engine_arguments, add_model_argument, positive, table

HELP = "speed kept when another process takes a core"


def add_arguments(part: argparse.ArgumentParser) -> None:
    add_model_argument(part)
    part.add_argument("--rows", type=positive, default=1, help="requests of the step")
    part.add_argument(
        "--context-tokens", type=positive, default=128, help="tokens in each request's cache"
    )
    part.add_argument("--rounds", type=positive, default=5, help="pairs of runs")
    part.add_argument("--output-tokens", type=positive, default=32)
    part.add_argument("--json", action="store_true", help="one JSON document instead")
    add_engine_arguments(part)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text."""
    from kdecode.bench.contention import (
        LEAST_SHARE,
        Competitor,
        last_core,
        measure_contention,
        median_share,
    )
    from kdecode.bench.engine_arm import random_arrivals

    llm, _ = bench_layer.open_engine(args, args.output_tokens)
    core = last_core()
    pairs = measure_contention(
        lambda: random_arrivals(llm, args.rows, args.context_tokens, args.output_tokens),
        args.rounds,
        lambda: Competitor(core),
    )
    share = median_share(pairs)
    rows = [("pair", "tok/s alone", "beside it", "kept")]
    rows += [
        (str(number), *(f"{speed:.2f}" for speed in pair.speeds), f"{pair.share:.0%}")
        for number, pair in enumerate(pairs)
    ]
    threads = llm.engine_config.resolved_threads()
    text = "\n".join(
        [
            f"backend {llm.engine_config.decode_backend}, {threads} threads, a process busy on "
            f"core {core}",
            table(rows),
            f"median {share:.0%} kept; at least {LEAST_SHARE:.0%} is expected on two cores or more",
        ]
    )
    document = {
        "backend": llm.engine_config.decode_backend,
        "rows": args.rows,
        "context_tokens": args.context_tokens,
        "core": core,
        "pairs": [
            {"free_tokens_per_second": free, "shared_tokens_per_second": shared}
            for free, shared in (pair.speeds for pair in pairs)
        ],
        "share": share,
        "least_share": LEAST_SHARE,
        "config": llm.resolved_config(),
    }
    return document, text
