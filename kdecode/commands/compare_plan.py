"""`kdecode compare --plan` and `--explain`: before a comparison of servers, and after it.

Owns the flags that only these have. Neither asks a server; what is printed is `bench.serving`'s.
"""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from kdecode.commands.common import InputError
from kdecode.commands.compare_design import clients_of, design_of, workload_as_planned

if TYPE_CHECKING:
    from kdecode.bench.serving.launch import Launch
    from kdecode.bench.serving.plan import Expected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "before and after a comparison of servers", "nothing is asked of a server"
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="print what would be run, in which order, for how long, and what a ratio needs",
    )
    group.add_argument("--expect-ttft-ms", type=float, metavar="MS", help="for the time of --plan")
    group.add_argument("--expect-tpot-ms", type=float, metavar="MS", help="for the time of --plan")
    group.add_argument(
        "--explain",
        nargs=2,
        metavar=("COMPARISON.json", "NAME"),
        help="formula, window, requests and source of tokens of one figure, such as tpot",
    )


def plan(
    args: argparse.Namespace, points: list[argparse.Namespace], launches: tuple[Launch, ...]
) -> int:
    """Raises InputError for what a comparison would not be run with."""
    from kdecode.bench.serving.plan import plan_lines

    expected = _expected(args)
    clients = clients_of(args)
    started = [shlex.join(launch.command) for launch in launches]
    where = started or [f"{c.target.scheme}://{c.target.authority}" for c in clients]
    arms = [(client.name, place) for client, place in zip(clients, where, strict=True)]
    for number, point in enumerate(points):
        if len(points) > 1:
            print(f"comparison {number + 1} of {len(points)}")
        lines = plan_lines(arms, workload_as_planned(point), design_of(point), expected)
        print("\n".join([*lines, ""]))
    return 0


def _expected(args: argparse.Namespace) -> Expected | None:
    from kdecode.bench.serving.plan import Expected

    given = (args.expect_ttft_ms, args.expect_tpot_ms)
    if given == (None, None):
        return None
    if None in given:
        raise InputError("--expect-ttft-ms and --expect-tpot-ms are given together.")
    for flag, value in zip(("ttft", "tpot"), given, strict=True):
        if not 0 <= value < math.inf:
            raise InputError(f"--expect-{flag}-ms is {value:g}; it must be a number from 0 on.")
    return Expected(*(value / 1e3 for value in given))


def explain(words: list[str]) -> int:
    from kdecode.bench.serving.explain import explain as lines_of
    from kdecode.bench.serving.stored import StoredError, read_document

    path, name = words
    try:
        print("\n".join(lines_of(read_document(Path(path)), name)))
    except StoredError as error:
        raise InputError(str(error)) from error
    return 0
