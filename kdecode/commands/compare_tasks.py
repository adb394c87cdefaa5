"""`kdecode compare --task`: graded tasks put to two servers, instead of their speed.

Owns the flags; asking and grading are `kdecode.bench.quality`'s.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from kdecode.commands import compare_servers
from kdecode.commands.common import InputError, ProgressBar, positive, write_json
from kdecode.commands.compare_design import clients_of

if TYPE_CHECKING:
    from kdecode.bench.quality.run import QualityComparison
    from kdecode.bench.serving.launch import Launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def grade(args: argparse.Namespace, launches: tuple[Launch, ...]) -> int:
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
    clients, bar = clients_of(args), ProgressBar()

    async def ask() -> QualityComparison:
        async with AsyncExitStack() as servers:
            for launch in launches:
                bar.message(f"starting {launch.name}", launch.url)
                await servers.enter_async_context(launched(launch))
            return await compare_quality(*clients, tasks, asking, bar.message)

    try:
        found = compare_servers.run_loop(ask())
    except NoGradesError as error:
        raise InputError(str(error)) from error
    bar.clear()
    print(render(found), end="", file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json is not None:
        write_json(plain(found), args.json)
    return EXIT_CODES["outputs differ"] if found.differs else 0
