"""What the flags of a comparison of servers mean: servers, load, workload, design.

Owns the translation, and that flags which contradict each other are bad input.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from kdecode.commands.common import InputError
from kdecode.commands.launches import own_servers, recipe_servers

if TYPE_CHECKING:
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.design import Design
    from kdecode.bench.serving.launch import Launch
    from kdecode.bench.workloads.types import Workload

# Where a server does not tell the size of its vocabulary.
_TOKEN_IDS = "1000-20000"
# Of a K3 vocabulary, at its end: tokens that are no text.
_SPECIAL_TOKENS = 256
_SECONDS = 1e-3


def launches_of(args: argparse.Namespace) -> tuple[Launch, ...]:
    """Servers to start; their addresses, and what a recipe says, go into `args`."""
    has_urls = args.url_a is not None or args.url_b is not None
    if args.serve + (args.recipe is not None) + has_urls > 1:
        raise InputError("--serve, --recipe and --url-a with --url-b exclude each other.")
    launches: tuple[Launch, ...] = ()
    if not args.serve and (args.model is not None or args.speculative_config is not None):
        raise InputError("MODEL and --speculative-config are the servers' own; leave them out.")
    if args.serve:
        launches = own_servers(args, _longest_request(args))
    elif args.recipe is not None:
        launches = recipe_servers(args)
    if args.restart != "never" and (not launches or args.task is not None):
        raise InputError(
            f"--restart {args.restart} is of a comparison of speed that starts its servers, with "
            "--serve or --recipe."
        )
    if launches:
        args.url_a, args.url_b = (launch.url for launch in launches)
    if args.url_a is None or args.url_b is None:
        raise InputError("a comparison of servers needs both --url-a and --url-b.")
    return launches


def design_of(args: argparse.Namespace) -> Design:
    from kdecode.bench.serving.design import Design
    from kdecode.bench.serving.load import Load
    from kdecode.bench.serving.summary import Limits
    from kdecode.bench.workloads.types import WorkloadError

    named = {"--rate": args.rate, "--own-times": args.own_times or None}
    given = [flag for flag, value in {**named, "--concurrency": args.concurrency}.items() if value]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other; each is a shape of load.")
    for flag in ("near_tie_nats", "max_pause"):
        value = getattr(args, flag)
        if value is not None and not 0 <= value < math.inf:
            name = flag.replace("_", "-")
            raise InputError(f"--{name} is {value:g}; it must be a number from 0 on.")
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
            restart=args.restart,
            near_tie=args.near_tie_nats,
            limits=Limits(*(None if v is None else v * _SECONDS for v in limits)),
            seed=args.seed,
        )
    except (ValueError, WorkloadError) as error:
        raise InputError(str(error)) from error


def clients_of(args: argparse.Namespace) -> tuple[Client, Client]:
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.http import HttpError, Target

    made = []
    key = args.api_key or ""
    if not (key.isascii() and key.isprintable()):
        raise InputError("--api-key has characters that no HTTP header can have.")
    if not 0 < args.timeout < math.inf:
        raise InputError(f"--timeout is {args.timeout:g}; it is a number of seconds above 0.")
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


def _longest_request(args: argparse.Namespace) -> int:
    """Tokens of a prompt and its reply; a text has at most as many as bytes."""
    from kdecode.bench.quality.items import TaskError, load_task
    from kdecode.bench.workloads.types import WorkloadError

    try:
        if args.task is not None:
            tasks = [load_task(text, args.seed, args.task_limit) for text in args.task]
            texts = [str(item.messages).encode() for task in tasks for item in task.items]
            return int(args.task_max_tokens) + max(map(len, texts))
        workload = _made_or_read(args, _TOKEN_IDS)
    except (TaskError, WorkloadError) as error:
        raise InputError(str(error)) from error
    return max(
        request.max_tokens
        + len(request.prompt_ids or (request.prompt or str(request.messages)).encode())
        for request in workload.requests
    )


def workload_as_planned(args: argparse.Namespace) -> Workload:
    """As `workload_of`, of any tokens: the server's vocabulary is not known."""
    from kdecode.bench.workloads.types import WorkloadError

    try:
        return _made_or_read(args, args.token_ids or _TOKEN_IDS)
    except WorkloadError as error:
        raise InputError(str(error)) from error


async def workload_of(args: argparse.Namespace, client: Client) -> Workload:
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
