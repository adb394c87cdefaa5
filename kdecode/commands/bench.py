"""`kdecode bench`: the memory's speed, a backend's share of it, and where a step's time goes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdecode.commands import (
    bench_collectives,
    bench_contention,
    bench_import_log,
    bench_layer,
    bench_peers,
    bench_tune,
)
from kdecode.commands.common import (
    InputError,
    add_engine_arguments,
    add_model_argument,
    positive,
    table,
    write_json,
)
from kdecode.commands.help_format import HelpFormatter
from kdecode.config import EngineConfig

if TYPE_CHECKING:
    from kdecode.bench.decode_speed import DecodeRun

HELP = "measure decoding against the speed of memory"
DESCRIPTION = (
    "A step has to read its weights, state and cache once; the floor is the time that this takes "
    "at the read bandwidth measured right before and after. Runs in which other processes used "
    "more than a tenth of a core are marked spoilt."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    formatter = HelpFormatter
    roofline = parts.add_parser(
        "roofline", help="read bandwidth at 1 to all threads", formatter_class=formatter
    )
    roofline.add_argument("--threads", type=positive, help="most threads; default: every core")
    roofline.add_argument("--rounds", type=positive, default=7)
    roofline.add_argument("--json", action="store_true", help="one JSON document instead")
    decode = parts.add_parser(
        "decode", help="tokens a second, and the share of the floor", formatter_class=formatter
    )
    add_model_argument(decode)
    decode.add_argument("--rows", type=positive, default=1, help="requests of the step")
    decode.add_argument(
        "--context-tokens", type=positive, default=128, help="tokens in each request's cache"
    )
    decode.add_argument("--runs", type=positive, default=5)
    decode.add_argument("--output-tokens", type=positive, default=32)
    decode.add_argument("--json", action="store_true", help="one JSON document instead")
    add_engine_arguments(decode)
    layer = parts.add_parser("layer", help=bench_layer.HELP, formatter_class=formatter)
    bench_layer.add_arguments(layer)
    tune = parts.add_parser("tune", help=bench_tune.HELP, formatter_class=formatter)
    bench_tune.add_arguments(tune)
    peers = parts.add_parser("peers", help=bench_peers.HELP, formatter_class=formatter)
    bench_peers.add_arguments(peers)
    contention = parts.add_parser(
        "contention", help=bench_contention.HELP, formatter_class=formatter
    )
    bench_contention.add_arguments(contention)
    collectives = parts.add_parser(
        "collectives", help=bench_collectives.HELP, formatter_class=formatter
    )
    bench_collectives.add_arguments(collectives)
    log = parts.add_parser("import-log", help=bench_import_log.HELP, formatter_class=formatter)
    bench_import_log.add_arguments(log)


def run(args: argparse.Namespace) -> int:
    parts: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], str]]] = {
        "roofline": _roofline,
        "decode": _decode,
        "layer": bench_layer.run,
        "tune": bench_tune.run,
        "peers": bench_peers.run,
        "contention": bench_contention.run,
        "collectives": bench_collectives.run,
        "import-log": bench_import_log.run,
    }
    from kdecode.bench.decode_speed import NoWindowError

    try:
        document, text = parts[args.part](args)
    except NoWindowError as error:
        raise InputError(f"{error} output-tokens is {args.output_tokens}.") from error
    if args.json:
        write_json(document, "-")
    else:
        print(text)
    return 0


def _roofline(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.bench.kernel import ReadProbe
    from kdecode.bench.machine import read_machine
    from kdecode.bench.roofline import measure_roofline, render_roofline

    most = EngineConfig(num_threads=args.threads).resolved_threads()
    bandwidths = measure_roofline(range(1, most + 1), ReadProbe, args.rounds)
    machine = read_machine()
    text = f"{machine.cpu}, {machine.cores} cores, {machine.date}\n"
    text += table(render_roofline(bandwidths))
    entries = [{**dataclasses.asdict(entry), "median": entry.median} for entry in bandwidths]
    return {"bandwidth": entries, "machine": dataclasses.asdict(machine)}, text


def _decode(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.bench.decode_speed import measure_decode, summary
    from kdecode.bench.engine_arm import random_arrivals

    llm, probe = bench_layer.open_engine(args, args.output_tokens)
    cost = llm.inspect_decode(args.rows, args.context_tokens, 3)
    size = args.rows, args.context_tokens, args.output_tokens
    runs = measure_decode(
        lambda: random_arrivals(llm, *size), probe, args.rows, cost.num_bytes, args.runs
    )
    speed, share, clean = summary(runs)
    rows = [("run", "tok/s", "of the floor", "GB/s before", "after", "others' cores", "")]
    rows += [_run_row(number, entry) for number, entry in enumerate(runs)]
    experts = [step.distinct_experts for step in cost.steps if step.distinct_experts is not None]
    text = "\n".join(
        [
            bench_layer.title(cost, llm.engine_config),
            bench_layer.bytes_line(cost),
            *([f"distinct experts a layer: {sum(experts) / len(experts):.1f}"] if experts else []),
            table(rows),
            f"median of {clean or len(runs)} runs{'' if clean else ', ALL SPOILT'}: "
            f"{speed:.2f} tok/s, {share:.0%} of the floor",
        ]
    )
    document = {
        "backend": cost.backend,
        "rows": args.rows,
        "context_tokens": args.context_tokens,
        "step_bytes": cost.num_bytes,
        "weight_bytes": sum(step.weight_bytes for step in cost.steps),
        "runs": [
            {
                **dataclasses.asdict(entry),
                "tokens_per_second": entry.tokens_per_second,
                "floor_share": entry.floor_share,
                "is_spoilt": entry.is_spoilt,
            }
            for entry in runs
        ],
        "tokens_per_second": speed,
        "floor_share": share,
        "clean_runs": clean,
        "config": llm.resolved_config(),
    }
    return document, text


def _run_row(number: int, run: DecodeRun) -> tuple[str, ...]:
    others = "-" if run.others_cores is None else f"{run.others_cores:.2f}"
    return (
        str(number),
        f"{run.tokens_per_second:.2f}",
        f"{run.floor_share:.0%}",
        *(f"{probe / 1e9:.1f}" for probe in run.probes),
        others,
        "spoilt" if run.is_spoilt else "",
    )
