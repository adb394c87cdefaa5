"""`kdecode bench peers --server`: our server beside llama.cpp's, on the same weights.

Owns the servers' command lines and what is printed. The protocol is `bench.server_peers`', the
files and the check of logits are those of `bench peers`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kdecode.commands.common import InputError, ProgressBar, model_directory, table
from kdecode.commands.process import until_signal
from kdecode.config import EngineConfig

if TYPE_CHECKING:
    from kdecode.bench.peers import Divergence
    from kdecode.bench.server_peers import ServerPass
    from kdecode.bench.serving.launch import Launch
    from kdecode.commands.peer_files import Files

PROGRAM = "llama-server"


@dataclass(frozen=True)
class ServerArm:
    """As `bench.peers` wants to see an arm, and how it is started."""

    name: str
    version: str
    keeps_weights: bool
    launch: Launch
    model: str | None = None


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text. Raises InputError for peers that are not there."""
    from kdecode.bench.llama_cpp import PeerError
    from kdecode.bench.machine import read_machine
    from kdecode.bench.metrics import MetricError
    from kdecode.bench.serving.launch import LaunchError, free_ports
    from kdecode.commands.peer_files import Check, Files, backends, file_kind
    from kdecode.model.gguf_tensors import GgufError

    if args.blocks < 2:
        raise InputError(f"blocks is {args.blocks}; an interval needs at least 2.")
    if "transformers" in (args.peer or ()):
        raise InputError("transformers has no server here; --server takes llama.cpp's files.")
    directory = model_directory(args)
    bar = ProgressBar()
    try:
        with Files.open(args, directory) as files:
            agreement = Check(args, files, bar).agreement
            backend_names = backends(args)
            for name in files.names:
                files.path(file_kind(name), bar)
            # Chosen right before they are used.
            ports = iter(free_ports(len(backend_names) + len(files.names)))
            ours = [_own_server(args, files, name, next(ports)) for name in backend_names]
            peers = [_llama_server(args, files, name, next(ports), bar) for name in files.names]
            arms = [*ours, *peers]
            passes = _measure(args, files, arms, bar)
    except (GgufError, PeerError, LaunchError, MetricError) as error:
        raise InputError(str(error)) from error
    finally:
        bar.clear()
    document = _document(args, arms, len(ours), passes, agreement)
    machine = read_machine()
    document["machine"] = asdict(machine)
    head = f"{machine.cpu}, {machine.cores} cores, {machine.date}; prompts of "
    head += f"{args.context_tokens:,} tokens, replies of {args.output_tokens}, greedy, streamed"
    return document, "\n".join([head, *_report(document)])


def _measure(
    args: argparse.Namespace, files: Files, arms: Sequence[ServerArm], bar: ProgressBar
) -> list[ServerPass]:
    from kdecode.bench.server_peers import ServerWork, measure_servers
    from kdecode.bench.serving.client import Client
    from kdecode.bench.serving.http import Target
    from kdecode.bench.serving.launch import launched
    from kdecode.bench.workloads.synthetic import TokenRange

    # Ordinary tokens of every vocabulary.
    tokens = TokenRange(256, min(files.config.vocab_size // 2, 8192))
    work = ServerWork(args.context_tokens, args.output_tokens, args.requests_per_slot, tokens)
    clients = [Client(arm.name, Target.from_url(arm.launch.url), arm.model) for arm in arms]

    async def run() -> list[ServerPass]:
        async with AsyncExitStack() as servers:
            for arm in arms:
                bar.message(f"starting {arm.name}")
                await servers.enter_async_context(launched(arm.launch))
            return await measure_servers(clients, work, args.concurrency, args.blocks, bar.message)

    # A signal ends the servers, too.
    return asyncio.run(until_signal(run()))


def _most(args: argparse.Namespace) -> tuple[int, int]:
    """Requests at a time, and tokens of one, a little more than are needed."""
    needed = args.context_tokens + args.output_tokens
    return max(args.concurrency), needed + 256 - needed % 128


def _own_server(args: argparse.Namespace, files: Files, backend: str, port: int) -> ServerArm:
    from importlib import metadata

    from kdecode.bench.serving.launch import Launch

    slots, context = _most(args)
    command = [sys.executable, "-P", "-m", "kdecode.cli", "serve", str(files.directory)]
    command += ["--port", str(port), "--decode-backend", backend]
    command += ["--max-num-seqs", str(slots), "--max-model-len", str(context)]
    flags = {
        "--threads": args.threads,
        "--isa": args.isa,
        "--lossless-packing": args.lossless_packing,
        "--trunk-format": args.trunk_format,
    }
    command += [text for flag, v in flags.items() if v is not None for text in (flag, str(v))]
    launch = Launch(f"kdecode {backend}", command, f"http://127.0.0.1:{port}")
    suffix = "" if args.trunk_format == "bf16" else f" {args.trunk_format}"
    return ServerArm(
        name=f"kdecode {backend}{suffix}",
        version=f"kdecode {metadata.version('kdecode')}",
        keeps_weights=args.trunk_format == "bf16",
        launch=launch,
    )


def _llama_server(
    args: argparse.Namespace, files: Files, name: str, port: int, bar: ProgressBar
) -> ServerArm:
    import shutil

    from kdecode.bench.serving.launch import Launch
    from kdecode.commands.peer_files import file_kind

    program = shutil.which(PROGRAM)
    if program is None or files.llama is None:
        raise InputError(f"llama.cpp is not on the PATH: {PROGRAM} not found.")
    kind = file_kind(name)
    slots, context = _most(args)
    threads = str(EngineConfig(num_threads=args.threads).resolved_threads())
    command = [program, "-m", str(files.path(kind, bar)), "--host", "127.0.0.1"]
    # Its context is shared out among the requests that it serves at a time.
    command += ["--port", str(port), "-np", str(slots), "-c", str(slots * context)]
    command += ["-t", threads, "-tb", threads]
    return ServerArm(
        name=f"{name} server",
        version=files.llama.version(),
        keeps_weights=kind == "released",
        launch=Launch(name, command, f"http://127.0.0.1:{port}"),
    )


def _document(
    args: argparse.Namespace,
    arms: Sequence[ServerArm],
    num_ours: int,
    passes: Sequence[ServerPass],
    agreement: Divergence,
) -> dict[str, Any]:
    from kdecode.bench.peers import refusal
    from kdecode.bench.server_peers import server_ratio

    ratios = []
    for concurrency in args.concurrency:
        mine = [one for one in passes if one.concurrency == concurrency]
        for ours in range(num_ours):
            for peer in range(ours + 1, len(arms)):
                is_llama = peer >= num_ours
                reason = refusal(arms[ours], arms[peer], agreement, needs_check=is_llama)
                entry: dict[str, Any] = {
                    "concurrency": concurrency,
                    "ours": arms[ours].name,
                    "peer": arms[peer].name,
                    "refusal": reason,
                }
                if reason is None:
                    pair = mine, ours, peer
                    speed = server_ratio(*pair, lambda one: 1 / one.output_tps, args.engine_seed)
                    gaps = server_ratio(*pair, lambda one: one.icl_p90_s, args.engine_seed)
                    entry |= {"output_tps": asdict(speed), "icl_p90": asdict(gaps)}
                ratios.append(entry)
    return {
        "prompt_tokens": args.context_tokens,
        "output_tokens": args.output_tokens,
        "agreement": asdict(agreement),
        "arms": [
            {
                "name": arm.name,
                "version": arm.version,
                "keeps_weights": arm.keeps_weights,
                "command": list(arm.launch.command),
            }
            for arm in arms
        ],
        "passes": [asdict(one) for one in passes],
        "ratios": ratios,
    }


def _report(document: dict[str, Any]) -> Iterator[str]:
    from statistics import median

    agreement = document["agreement"]
    yield (
        f"logits of llama.cpp on F32 weights against the fp32 reference: KL "
        f"{agreement['mean']:.1e} nats"
    )
    yield "output tok/s: sum(n) / duration of the pass, prefill inside; ITL: gaps between chunks"
    yield ""
    rows = [
        (
            *("at a time", "server", "output tok/s", "ITL P50, ms", "P90, ms", "TTFT P50, ms"),
            *("tok/chunk", "weights"),
        )
    ]
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in document["passes"]:
        groups.setdefault((one["concurrency"], one["arm"]), []).append(one)

    def middle(passes: Sequence[dict[str, Any]], name: str) -> float:
        return median(one[name] for one in passes)

    for (concurrency, arm), passes in sorted(groups.items()):
        about = document["arms"][arm]
        rows.append(
            (
                str(concurrency),
                about["name"],
                f"{middle(passes, 'output_tps'):.1f}",
                f"{1e3 * middle(passes, 'icl_p50_s'):.2f}",
                f"{1e3 * middle(passes, 'icl_p90_s'):.2f}",
                f"{1e3 * middle(passes, 'ttft_p50_s'):.1f}",
                f"{middle(passes, 'tokens_per_chunk'):.2f}",
                "as released" if about["keeps_weights"] else "DIFFER FROM THE CHECKPOINT",
            )
        )
    yield table(rows)
    yield ""
    for ratio in document["ratios"]:
        pair = f"{ratio['concurrency']} at a time, {ratio['ours']} / {ratio['peer']}"
        if ratio["refusal"] is not None:
            yield f"{pair}: no ratio, {ratio['refusal']}"
            continue
        texts = [
            f"{label} {found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"
            for label, found in (("output", ratio["output_tps"]), ("P90 ITL", ratio["icl_p90"]))
        ]
        yield f"{pair}: {', '.join(texts)} (above 1: the first is faster)"
    yield ""
    yield "; ".join(dict.fromkeys(arm["version"] for arm in document["arms"]))
