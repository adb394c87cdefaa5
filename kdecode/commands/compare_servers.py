"""`kdecode compare` of two servers: those behind two URLs, or two that it starts itself.

Owns the run and what is written; the flags are `compare_flags`', what they mean `compare_design`'s,
the comparison `kdecode.bench.serving`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kdecode.commands import compare_flags
from kdecode.commands.common import InputError, ProgressBar, check_output_file, write_json
from kdecode.commands.compare_design import clients_of, design_of, launches_of, workload_of
from kdecode.commands.process import OutputError, until_signal

if TYPE_CHECKING:
    from kdecode.bench.machine import Machine
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.design import Design
    from kdecode.bench.serving.facts import ServerFacts
    from kdecode.bench.serving.hosting import Hosts
    from kdecode.bench.serving.launch import Launch
    from kdecode.bench.serving.sweep import SweepPoint

Found = TypeVar("Found")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kdecode.commands import compare_plan, compare_tasks

    compare_flags.add_arguments(parser)
    compare_plan.add_arguments(parser)
    compare_tasks.add_arguments(parser)


def is_asked_for(args: argparse.Namespace) -> bool:
    """Whether servers are compared. Raises InputError for their flags where there are none."""
    return compare_flags.is_about_servers(args)


def run(args: argparse.Namespace) -> int:
    from kdecode.commands import compare_plan

    if args.explain is not None:
        return compare_plan.explain(args.explain)
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
    from kdecode.commands import compare_plan, compare_tasks

    _check_reports(args)
    # A recipe says what is measured; what is measured says how large servers of ours have to be.
    launches = launches_of(args) if args.recipe is not None else ()
    points = _points(args)
    launches = launches or launches_of(args)
    if args.plan:
        return compare_plan.plan(args, points, launches)
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
    for flag, is_given in (("--preflight", args.preflight), ("--plan", args.plan)):
        if is_given and any(x is not None for x in (args.json, args.out, args.task)):
            raise InputError(f"{flag} measures nothing; leave out --json, --out and --task.")
    if args.preflight and args.plan:
        raise InputError("--preflight asks the servers and --plan does not; name one of them.")
    if args.task is not None and args.out is not None:
        raise InputError("--out is a report of speed; grades are written by --json.")


def _preflight(args: argparse.Namespace, launches: tuple[Launch, ...]) -> int:
    from kdecode.bench.serving.facts import read_facts
    from kdecode.bench.serving.gate import configuration_problems, facts_differences
    from kdecode.bench.serving.hosting import Launched
    from kdecode.bench.serving.report import preflight_lines
    from kdecode.bench.verdicts import EXIT_CODES

    a, b = clients_of(args)

    async def read() -> tuple[ServerFacts, ServerFacts]:
        async with Launched(launches, args.restart) as hosts:
            found = []
            for arm, client in enumerate((a, b)):
                if launches:
                    await hosts.turn(arm, arm)
                found.append(await read_facts(client))
            return found[0], found[1]

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
    """Raises InputError for a folder that cannot be written, before anything is measured."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except OSError as error:
        raise InputError(f"the folder {path} cannot be written: {error.strerror}") from error


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
        raise OutputError(f"the folder {folder} cannot be written: {error}") from error
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
    from kdecode.bench.serving.hosting import Launched, Standing
    from kdecode.bench.serving.protocol import compare_servers
    from kdecode.bench.serving.sweep import SweepPoint

    found = []
    async with AsyncExitStack() as stack:
        hosts: Hosts = Standing()
        if launches:
            servers = Launched(launches, designs[0].restart, bar.message)
            hosts = await stack.enter_async_context(servers)
        for args, design in zip(points, designs, strict=True):
            await hosts.turn(0, 0)
            workload = await workload_of(args, clients[0])
            comparison = await compare_servers(*clients, workload, design, bar.message, hosts)
            found.append(SweepPoint(args.concurrency or 1, args.prompt_tokens, comparison))
    return found
