"""`kdecode compare` of two servers: those behind two URLs, or two that it starts itself.

Owns the flags of a comparison of servers and what they mean together; the comparison is
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
from kdecode.commands.launches import own_servers, recipe_servers

if TYPE_CHECKING:
    from kdecode.bench.machine import Machine
    from kdecode.bench.quality.run import QualityComparison
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.launch import Launch
    from kdecode.bench.serving.protocol import Design, ServedComparison
    from kdecode.bench.workloads.types import Workload

Found = TypeVar("Found")
# Where a server does not tell the size of its vocabulary.
_TOKEN_IDS = "1000-20000"
# Of a K3 vocabulary, at its end: tokens that are no text.
_SPECIAL_TOKENS = 256
_SECONDS = 1e-3


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
    _add_task_arguments(parser)
    group.add_argument(
        "--ratio",
        nargs=2,
        metavar=("ONE.json", "TWO.json"),
        help="the ratio of arm a of ONE and arm b of TWO; refused unless they are one comparison",
    )


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "graded tasks of two servers", "instead of their speed; exit code 4 where grades differ"
    )
    group.add_argument(
        "--task",
        action="append",
        metavar="NAME=FILE",
        help="aime25, gpqa-diamond or mrcr, from a file that you have; mrcr alone makes its items",
    )
    group.add_argument("--task-limit", type=positive, metavar="N", help="the first items only")
    group.add_argument("--task-max-tokens", type=positive, default=32768, metavar="N")
    group.add_argument("--task-temperature", type=float, default=0.0, metavar="T")
    group.add_argument("--task-repeats", type=positive, default=1, metavar="K", help="for avg@K")


def is_asked_for(args: argparse.Namespace) -> bool:
    given = (args.url_a, args.url_b, args.ratio, args.recipe, args.task)
    return args.serve or any(value is not None for value in given)


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

    launches = _launches(args)
    if args.json is not None:
        check_output_file(args.json)
    if args.out is not None:
        _check_folder(args.out)
    if args.task is not None:
        return _grade(args, launches)
    design = _design(args)
    clients = _clients(args)
    bar = ProgressBar()
    comparison = run_loop(_compare(args, launches, clients, design, bar))
    bar.clear()
    machine = read_machine()
    report = sys.stderr if args.json == "-" else sys.stdout
    print(render(comparison, machine), end="", file=report)
    if args.out is not None:
        _write_folder(args.out, comparison, machine)
    if args.json is not None:
        write_json(document_of(comparison, machine), args.json)
    return comparison.exit_code


def _grade(args: argparse.Namespace, launches: tuple[Launch, ...]) -> int:
    from kdecode.bench.quality.items import TaskError, load_task
    from kdecode.bench.quality.run import Asking, NoGradesError, compare_quality, render
    from kdecode.bench.serving.launch import launched
    from kdecode.bench.tables import plain
    from kdecode.bench.verdicts import EXIT_CODES

    try:
        tasks = [load_task(text, args.seed, args.task_limit) for text in args.task]
        asking = Asking(
            max_tokens=args.task_max_tokens,
            temperature=args.task_temperature,
            repeats=args.task_repeats,
            concurrency=args.concurrency or 1,
            seed=args.seed,
        )
    except (TaskError, ValueError) as error:
        raise InputError(str(error)) from error
    clients, bar = _clients(args), ProgressBar()

    async def ask() -> QualityComparison:
        async with AsyncExitStack() as servers:
            for launch in launches:
                bar.message(f"starting {launch.name}", launch.url)
                await servers.enter_async_context(launched(launch))
            return await compare_quality(*clients, tasks, asking, bar.message)

    try:
        found = run_loop(ask())
    except NoGradesError as error:
        raise InputError(str(error)) from error
    bar.clear()
    print(render(found), end="", file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json is not None:
        write_json(plain(found), args.json)
    return EXIT_CODES["outputs differ"] if found.differs else 0


def _check_folder(path: str) -> None:
    """Raises InputError for a folder that cannot be made, before anything is measured."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {path} cannot be made: {error.strerror}") from error


def _write_folder(path: str, comparison: ServedComparison, machine: Machine) -> None:
    from kdecode.bench.serving.folder import write_folder

    try:
        written = write_folder(Path(path), comparison, machine)
    except OSError as error:
        raise InputError(f"the folder {path} cannot be written: {error}") from error
    print(f"wrote {len(written)} files to {path}", file=sys.stderr)


def _launches(args: argparse.Namespace) -> tuple[Launch, ...]:
    """Servers to start; their addresses, and what a recipe says, go into `args`."""
    has_urls = args.url_a is not None or args.url_b is not None
    if args.serve + (args.recipe is not None) + has_urls > 1:
        raise InputError("--serve, --recipe and --url-a with --url-b exclude each other.")
    launches: tuple[Launch, ...] = ()
    if not args.serve and (args.model is not None or args.speculative_config is not None):
        raise InputError("MODEL and --speculative-config are the servers' own; leave them out.")
    if args.serve:
        launches = own_servers(args)
    elif args.recipe is not None:
        launches = recipe_servers(args)
    if launches:
        args.url_a, args.url_b = (launch.url for launch in launches)
    if args.url_a is None or args.url_b is None:
        raise InputError("a comparison of servers needs both --url-a and --url-b.")
    return launches


def run_loop(main: Coroutine[Any, Any, Found]) -> Found:
    """Runs a comparison; what the servers or their addresses did wrong is bad input."""
    from kdecode.bench.serving.http import HttpError
    from kdecode.bench.serving.launch import LaunchError

    try:
        return asyncio.run(main)
    except (HttpError, LaunchError) as error:
        raise InputError(str(error)) from error


async def _compare(
    args: argparse.Namespace,
    launches: tuple[Launch, ...],
    clients: tuple[Client, Client],
    design: Design,
    bar: ProgressBar,
) -> ServedComparison:
    from kdecode.bench.serving.launch import launched
    from kdecode.bench.serving.protocol import compare_servers

    async with AsyncExitStack() as servers:
        for launch in launches:
            bar.message(f"starting {launch.name}", launch.url)
            await servers.enter_async_context(launched(launch))
        workload = await _workload(args, clients[0])
        return await compare_servers(*clients, workload, design, bar.message)


def _design(args: argparse.Namespace) -> Design:
    from kdecode.bench.serving.load import Load
    from kdecode.bench.serving.protocol import Design
    from kdecode.bench.serving.summary import Limits
    from kdecode.bench.workloads.types import WorkloadError

    limits = [args.good_ttft_ms, args.good_tpot_ms, args.good_e2e_ms]
    is_open = args.rate is not None or args.own_times
    closed = args.concurrency or (None if is_open else 1)
    try:
        return Design(
            load=Load(concurrency=closed, rate=args.rate, speed=args.speed, seed=args.seed),
            blocks=args.blocks,
            has_null=not args.no_null,
            order=args.order,
            cache=args.cache,
            near_tie=args.near_tie_nats,
            limits=Limits(*(None if v is None else v * _SECONDS for v in limits)),
            seed=args.seed,
        )
    except (ValueError, WorkloadError) as error:
        raise InputError(str(error)) from error


def _clients(args: argparse.Namespace) -> tuple[Client, Client]:
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.http import HttpError, Target

    made = []
    for name, url, model in (("a", args.url_a, args.model_a), ("b", args.url_b, args.model_b)):
        try:
            target = Target.from_url(url)
        except HttpError as error:
            raise InputError(str(error)) from error
        made.append(
            Client(
                name,
                target,
                model=model,
                api_key=args.api_key,
                seed=args.seed,
                timeout_s=args.timeout,
            )
        )
    return made[0], made[1]


async def _workload(args: argparse.Namespace, client: Client) -> Workload:
    from kdecode.bench.serving.http import fetch_json
    from kdecode.bench.workloads.types import WorkloadError

    text = args.token_ids
    if text is None:
        info = await fetch_json(client.target, "/tokenizer_info", headers=client.headers)
        size = (info or {}).get("vocab_size")
        is_known = isinstance(size, int) and size > _SPECIAL_TOKENS
        text = f"0-{size - _SPECIAL_TOKENS}" if is_known else _TOKEN_IDS
    try:
        return _made_or_read(args, text)
    except WorkloadError as error:
        raise InputError(str(error)) from error


def _made_or_read(args: argparse.Namespace, token_ids: str) -> Workload:
    """Raises WorkloadError."""
    from kdecode.bench.workloads.files import ReadSettings, read_workload
    from kdecode.bench.workloads.synthetic import AgentShape, TokenRange, agentic, fixed

    tokens = TokenRange.from_text(token_ids)
    if args.workload is not None:
        settings = ReadSettings(
            tokens=tokens,
            seed=args.seed,
            sessions=args.sessions,
            max_pause_s=args.max_pause,
            reply_mode="live" if args.live_replies else "recorded",
            max_tokens=args.output_tokens,
        )
        return read_workload(Path(args.workload), settings, args.workload_format)
    if args.agentic:
        return agentic(AgentShape(sessions=args.sessions or 10), tokens, args.seed)
    return fixed(args.prompts, args.prompt_tokens, args.output_tokens, tokens, args.seed)
