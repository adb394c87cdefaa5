"""`kdecode bench collectives`: adding up what every rank has, in shared memory and over gloo."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from kdecode.commands.common import InputError, positive, table

HELP = "microseconds in which ranks add up their parts: shared memory against gloo"


def add_arguments(part: argparse.ArgumentParser) -> None:
    part.add_argument(
        "--tensor-parallel-size", "-tp", type=positive, default=2, metavar="N", help="processes"
    )
    part.add_argument("--threads", type=positive, default=1, help="of each process")
    part.add_argument("--rounds", type=positive, default=7, help="turns of each")
    part.add_argument("--repeats", type=positive, default=200, help="exchanges of one turn")
    part.add_argument("--json", action="store_true", help="one JSON document instead")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text."""
    if args.tensor_parallel_size < 2:
        raise InputError("--tensor-parallel-size is 1; there is nothing to exchange below 2.")
    from kdecode.bench.collectives import WIDTH, Turns, measure_reduce
    from kdecode.bench.load import LoadMeter, is_spoilt
    from kdecode.bench.machine import read_machine

    size = args.tensor_parallel_size
    meter = LoadMeter()
    meter.start()
    times = measure_reduce(size, Turns(args.rounds, args.repeats, args.threads))
    others = meter.stop()
    machine = read_machine()
    rows = [("value", "bytes", "shared memory, us", "gloo, us", "gloo / shared memory")]
    for entry in times:
        shared, gloo = entry.medians
        rows.append(
            (
                f"{entry.rows} x {WIDTH}",
                f"{entry.num_bytes:,}",
                f"{shared * 1e6:.1f}",
                f"{gloo * 1e6:.1f}",
                f"{entry.ratio:.1f}",
            )
        )
    threads = args.threads
    text = "\n".join(
        [
            f"{machine.cpu}, {machine.cores} cores, {machine.date}"
            + ("  SPOILT by other processes" if is_spoilt(others) else ""),
            f"{size} processes of {threads} thread{'' if threads == 1 else 's'} each; medians of "
            f"{args.rounds} turns of {args.repeats} exchanges, the same bits both ways",
            table(rows),
        ]
    )
    document = {
        "tensor_parallel_size": size,
        "threads": threads,
        "repeats": args.repeats,
        "others_cores": others,
        "is_spoilt": is_spoilt(others),
        "reduce": [
            {
                **dataclasses.asdict(entry),
                "bytes": entry.num_bytes,
                "medians": entry.medians,
                "ratio": entry.ratio,
            }
            for entry in times
        ],
        "machine": dataclasses.asdict(machine),
    }
    return document, text
