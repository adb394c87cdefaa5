"""`kdecode compare` of two servers: those behind two URLs, or two that it starts itself.

Owns the flags, the run and what is written; what flags mean is `compare_design`'s, the comparison
`kdecode.bench.serving`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kdecode.commands.common import InputError, ProgressBar, check_output_file, positive, write_json
from kdecode.commands.compare_design import clients_of, design_of, launches_of, workload_of
from kdecode.commands.process import until_signal

if TYPE_CHECKING:
    from kdecode.bench.machine import Machine
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.facts import ServerFacts
    from kdecode.bench.serving.launch import Launch
    from kdecode.bench.serving.protocol import Design
    from kdecode.bench.serving.sweep import SweepPoint

Found = TypeVar("Found")

# Flags that mean nothing without servers; none of them is given by default.
_OF_SERVERS = (
    *("model_a", "model_b", "api_key", "concurrency", "rate", "sweep_concurrency"),
    *("sweep_prompt_tokens", "preflight", "no_null", "token_ids", "workload", "workload_format"),
    *("agentic", "sessions", "max_pause", "live_replies", "own_times", "out"),
    *("good_ttft_ms", "good_tpot_ms", "good_e2e_ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "two servers", "any two with OpenAI's interface, instead of two backends in this process"
    )
    group.add_argument("--url-a", metavar="URL", help="the baseline, such as http://host:8000")
    group.add_argument("--url-b", metavar="URL", help="the same URL twice is a null run")
    group.add_argument(
        "--serve",
        action="store_true",
        help="start a server of MODEL for each backend, and compare these",
    )
    group.add_argument(
        "--recipe", metavar="FILE", help="start the servers of a recipe, such as recipes/*.yaml"
    )
    group.add_argument("--model-a", metavar="NAME", help="default: the first that A serves")
    group.add_argument("--model-b", metavar="NAME", help="default: the first that B serves")
    group.add_argument("--api-key", metavar="KEY", help="of both servers")
    group.add_argument(
        "--concurrency", type=positive, metavar="N", help="closed loop of N sessions; default 1"
    )
    group.add_argument(
        "--rate", type=float, metavar="R", help="open loop of R sessions a second, Poisson"
    )
    group.add_argument(
        "--sweep-concurrency",
        type=positive,
        nargs="+",
        metavar="N",
        help="a comparison for each, and one table and page of all",
    )
    group.add_argument("--sweep-prompt-tokens", type=positive, nargs="+", metavar="N")
    group.add_argument(
        "--preflight",
        action="store_true",
        help="read both configurations, say whether they can be compared, and measure nothing",
    )
    group.add_argument(
        "--no-null", action="store_true", help="leave out the null run of A against itself"
    )
    group.add_argument(
        "--cache",
        choices=("salt", "reset", "as is"),
        default="salt",
        help="how prefix caches are brought into one state: cache_salt, /reset_prefix_cache, not",
    )
    group.add_argument("--token-ids", metavar="LOW-HIGH", help="ordinary tokens, for made prompts")
    group.add_argument(
        "--workload", metavar="FILE", help="a Mooncake or Weka trace, or chats; docs/evaluate.md"
    )
    group.add_argument("--workload-format", choices=("mooncake", "weka", "chat"), help="if unclear")
    group.add_argument(
        "--agentic", action="store_true", help="a made set of 10 agents' sessions, by --seed"
    )
    group.add_argument("--sessions", type=positive, metavar="N", help="the workload's first ones")
    group.add_argument("--max-pause", type=float, metavar="S", help="cut pauses inside of sessions")
    group.add_argument(
        "--live-replies",
        action="store_true",
        help="turns follow a server's own replies instead of the recorded ones: no pairs, no ratio",
    )
    group.add_argument(
        "--own-times", action="store_true", help="open loop by the times of the workload"
    )
    group.add_argument("--speed", type=float, default=1.0, help="of the workload's own times")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request")
    group.add_argument(
        "--near-tie-nats",
        type=float,
        default=0.5,
        metavar="X",
        help="replies may part where the two likeliest tokens are this close in ln p",
    )
    for name, of in (("ttft", "first token"), ("tpot", "time per token"), ("e2e", "latency")):
        group.add_argument(
            f"--good-{name}-ms", type=float, metavar="MS", help=f"goodput: limit of the {of}"
        )

    group.add_argument(
        "--out",
        metavar="DIR",
        help="write report.html, report.md, comparison.json, requests.jsonl and exports to DIR",
    )
    from kdecode.commands import compare_tasks

    compare_tasks.add_arguments(parser)
    group.add_argument(
        "--ratio",
        nargs=2,
        metavar=("ONE.json", "TWO.json"),
        help="the ratio of arm a of ONE and arm b of TWO; refused unless they are one comparison",
    )


def is_asked_for(args: argparse.Namespace) -> bool:
    """Raises InputError for flags of servers where there are none."""
    given = (args.url_a, args.url_b, args.ratio, args.recipe, args.task)
    if args.serve or any(value is not None for value in given):
        return True
    alone = [name for name in _OF_SERVERS if getattr(args, name) not in (None, False)]
    if alone:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in alone)
        raise InputError(
            f"{flags}: only a comparison of servers has this; --serve starts one of each backend."
        )
    return False


def run(args: argparse.Namespace) -> int:
    return _measure(args) if args.ratio is None else _ratio(args.ratio)


def _ratio(paths: list[str]) -> int:
    from kdecode.bench.serving.stored import (
        RefusedRatioError,
        StoredError,
        ratio_of,
        read_document,
    )
    from kdecode.bench.tables import estimate_text
    from kdecode.bench.verdicts import EXIT_CODES

    try:
        found = ratio_of(*(read_document(Path(path)) for path in paths))
    except RefusedRatioError as error:
        print(error)
        return EXIT_CODES["not comparable"]
    except StoredError as error:
        raise InputError(str(error)) from error
    print(estimate_text("tpot", found))
    return 0


def _measure(args: argparse.Namespace) -> int:
    from kdecode.bench.machine import read_machine
    from kdecode.bench.serving.report import render
    from kdecode.bench.serving.stored import document_of
    from kdecode.bench.serving.sweep import render_sweep
    from kdecode.commands import compare_tasks

    _check_reports(args)
    # A recipe says what is measured; what is measured says how large servers of ours have to be.
    launches = launches_of(args) if args.recipe is not None else ()
    points = _points(args)
    launches = launches or launches_of(args)
    if args.json is not None:
        check_output_file(args.json)
    if args.out is not None:
        _check_folder(args.out)
    if args.preflight:
        return _preflight(args, launches)
    if args.task is not None:
        return compare_tasks.grade(args, launches)
    designs = [design_of(point) for point in points]
    bar = ProgressBar()
    found = run_loop(_compare(points, launches, clients_of(args), designs, bar))
    bar.clear()
    machine = read_machine()
    report = sys.stderr if args.json == "-" else sys.stdout
    for one in found:
        print(render(one.comparison, machine), end="", file=report)
    if _is_sweep(args):
        print("\n" + render_sweep(found), end="", file=report)
    if args.out is not None:
        _write_folders(args, found, machine)
    if args.json is not None:
        documents = [document_of(one.comparison, machine) for one in found]
        write_json(documents if _is_sweep(args) else documents[0], args.json)
    return max(one.comparison.exit_code for one in found)


def _check_reports(args: argparse.Namespace) -> None:
    """Raises InputError for files that would never be written."""
    if args.preflight and (args.json is not None or args.out is not None or args.task is not None):
        raise InputError("--preflight measures nothing; leave out --json, --out and --task.")
    if args.task is not None and args.out is not None:
        raise InputError("--out is a report of speed; grades are written by --json.")


def _preflight(args: argparse.Namespace, launches: tuple[Launch, ...]) -> int:
    from kdecode.bench.serving.facts import read_facts
    from kdecode.bench.serving.gate import configuration_problems, facts_differences
    from kdecode.bench.serving.launch import launched
    from kdecode.bench.serving.report import preflight_lines
    from kdecode.bench.verdicts import EXIT_CODES

    a, b = clients_of(args)

    async def read() -> tuple[ServerFacts, ServerFacts]:
        async with AsyncExitStack() as servers:
            for launch in launches:
                await servers.enter_async_context(launched(launch))
            return await read_facts(a), await read_facts(b)

    facts = run_loop(read())
    differences = facts_differences(*facts)
    problems = [*configuration_problems((a.name, b.name), facts)]
    print("\n".join(preflight_lines((a.name, b.name), facts, differences, problems)))
    return EXIT_CODES["not comparable"] if differences or problems else 0


def _is_sweep(args: argparse.Namespace) -> bool:
    return args.sweep_concurrency is not None or args.sweep_prompt_tokens is not None


def _points(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The flags of each comparison; those of servers that are started hold for all of them."""
    if not _is_sweep(args):
        return [args]
    if args.workload is not None or args.agentic or args.rate is not None or args.own_times:
        raise InputError("a sweep is over made requests of fixed lengths, in a closed loop.")
    if args.task is not None:
        raise InputError("a sweep is of speed; leave out its flags for tasks.")
    concurrencies = args.sweep_concurrency or [args.concurrency or 1]
    lengths = args.sweep_prompt_tokens or [args.prompt_tokens]
    args.concurrency, args.prompt_tokens = max(concurrencies), max(lengths)
    shared = vars(args)
    return [
        argparse.Namespace(
            **{
                **shared,
                "concurrency": concurrency,
                "prompt_tokens": length,
                # So many that all of them are busy.
                "prompts": max(args.prompts, 2 * concurrency),
            }
        )
        for length in lengths
        for concurrency in concurrencies
    ]


def _check_folder(path: str) -> None:
    """Raises InputError for a folder that cannot be made, before anything is measured."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {path} cannot be made: {error.strerror}") from error


def _write_folders(args: argparse.Namespace, found: list[SweepPoint], machine: Machine) -> None:
    """One folder, or in a sweep one for each point and a page of all."""
    from kdecode.bench.serving.folder import write_folder
    from kdecode.bench.serving.sweep import render_sweep_html

    folder = Path(args.out)
    try:
        if not _is_sweep(args):
            write_folder(folder, found[0].comparison, machine)
        else:
            for one in found:
                name = f"{one.concurrency}-at-a-time-{one.prompt_tokens}-prompt-tokens"
                write_folder(folder / name, one.comparison, machine)
            (folder / "sweep.html").write_text(render_sweep_html(found), encoding="utf-8")
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be written: {error}") from error
    print(f"reports are in {folder}", file=sys.stderr)


def run_loop(main: Coroutine[Any, Any, Found]) -> Found:
    """Runs a comparison; what the servers or their addresses did wrong is bad input."""
    from kdecode.bench.serving.http import HttpError
    from kdecode.bench.serving.launch import LaunchError

    try:
        return asyncio.run(until_signal(main))
    except (HttpError, LaunchError) as error:
        raise InputError(str(error)) from error


async def _compare(
    points: list[argparse.Namespace],
    launches: tuple[Launch, ...],
    clients: tuple[Client, Client],
    designs: list[Design],
    bar: ProgressBar,
) -> list[SweepPoint]:
    """Each comparison in turn, on the same servers."""
    from kdecode.bench.serving.launch import launched
    from kdecode.bench.serving.protocol import compare_servers
    from kdecode.bench.serving.sweep import SweepPoint

    found = []
    async with AsyncExitStack() as servers:
        for launch in launches:
            bar.message(f"starting {launch.name}", launch.url)
            await servers.enter_async_context(launched(launch))
        for args, design in zip(points, designs, strict=True):
            workload = await workload_of(args, clients[0])
            comparison = await compare_servers(*clients, workload, design, bar.message)
            found.append(SweepPoint(args.concurrency or 1, args.prompt_tokens, comparison))
    return found
