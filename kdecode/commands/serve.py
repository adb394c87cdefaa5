"""`kdecode serve`: one model behind an OpenAI-compatible HTTP server.

Owns the flags, named as vLLM names them where they mean the same, and the process: sockets,
signals, exit codes. The interface itself is `kdecode.server`'s.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands import config_file
from kdecode.commands.common import (
    InputError,
    add_machine_arguments,
    add_model_argument,
    add_rank_arguments,
    add_speculative_argument,
    model_directory,
    open_model,
    positive,
    rank_settings,
)
from kdecode.config import DecodeBackend, EngineConfig, torch_run

if TYPE_CHECKING:
    import uvicorn

    from kdecode.server.api import ServerConfig

HELP = "serve a model over HTTP"
DESCRIPTION = (
    "The interface is OpenAI's (completions, chat completions, models) with /metrics, /health, "
    "/version, /tokenize, /detokenize and /config/fingerprint. SIGTERM lets running requests end. "
    'Needs the packages of the extra "serve".'
)
EXIT_BROKEN = 1
# vLLM's names of the cache's dtype, and ours.
CACHE_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}

PARSERS = ("kimi_k3",)

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # An abbreviation that works today may name another flag tomorrow.
    parser.allow_abbrev = False
    add_model_argument(parser)
    parser.add_argument(
        config_file.FLAG,
        metavar="FILE",
        help="a YAML file of these flags, `name: value`, and of `model`; the command line wins",
    )
    web = parser.add_argument_group("server")
    web.add_argument("--host", default="127.0.0.1", help="address to listen on")
    web.add_argument("--port", type=_port, default=8000, help="0 takes a free one")
    web.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model; by default the name of its directory",
    )
    web.add_argument(
        "--api-key", nargs="+", default=[], metavar="KEY", help="keys of which clients send one"
    )
    web.add_argument("--max-body-bytes", type=positive, default=32 * 2**20, help="of one request")
    web.add_argument(
        "--drain-seconds",
        type=positive,
        default=60,
        help="how long running requests may go on after SIGTERM",
    )
    web.add_argument(
        "--reasoning-parser", choices=PARSERS, help="the model's own; another one is refused"
    )
    web.add_argument(
        "--tool-call-parser", choices=PARSERS, help="the model's own; another one is refused"
    )
    web.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="what a model with tools does anyhow; refused for a model without",
    )
    _add_engine_arguments(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = EngineConfig()
    group = parser.add_argument_group("engine")
    group.add_argument("--decode-backend", choices=get_args(DecodeBackend))
    group.add_argument(
        "--additional-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help='an object with "decode_backend", as vLLM takes it',
    )
    group.add_argument(
        "--max-model-len",
        type=positive,
        default=defaults.max_context_tokens,
        help="tokens of a prompt and its reply",
    )
    group.add_argument(
        "--max-num-seqs",
        type=positive,
        default=defaults.max_requests,
        help="requests that run at a time",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=defaults.max_step_tokens,
        help="tokens of one step",
    )
    group.add_argument("--kv-cache-dtype", choices=tuple(CACHE_DTYPES), default="auto")
    group.add_argument(
        "--cache-scale", type=float, help="scale of an fp8 cache that the checkpoint has none for"
    )
    group.add_argument(
        "--block-size", type=positive, default=defaults.page_tokens, help="tokens of a cache page"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefixes of prompts that are in the caches are not computed again (default: on)",
    )
    group.add_argument(
        "--mamba-block-size",
        type=positive,
        metavar="TOKENS",
        help="prefixes end on its multiples, and prompts are cut there; default: what a step takes",
    )
    group.add_argument(
        "--state-cache-bytes",
        type=positive,
        help="host memory for KDA states of prefixes; default: four for each of --max-num-seqs",
    )
    group.add_argument("--seed", type=int, default=defaults.seed, help="of unseeded requests")
    add_machine_arguments(group)
    add_rank_arguments(group)
    add_speculative_argument(group)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    try:
        from kdecode.commands.draining_server import DrainingServer
        from kdecode.server.api import create_app
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed; serving needs `pip install 'kdecode[serve]'`."
        ) from error
    from kdecode.engine.async_engine import AsyncEngine

    if not args.api_key and not _is_loopback(args.host):
        print(
            f"kdecode serve: everyone who reaches {args.host} can use this server; --api-key "
            "limits it to those who have a key.",
            file=sys.stderr,
        )
    if args.model is None and args.config is not None:
        args.model = model_of(config_file.read(args.config))
    directory = model_directory(args)
    check_parsers(args, directory)
    torchrun = torch_run()
    # Its other processes listen nowhere, and may be on hosts that do not have this address.
    if torchrun is None or torchrun.rank == 0:
        check_address(args.host, args.port)
    llm = open_model(directory, config)
    # The server is made for the application, and the engine's death has to reach the server.
    servers: list[uvicorn.Server] = []
    engine = AsyncEngine(llm, on_death=lambda: _stop(servers))
    app = create_app(engine, server_config(args, directory))
    server = DrainingServer(
        app,
        engine,
        host=args.host,
        port=args.port,
        drain_seconds=args.drain_seconds,
        has_access_log=args.verbose,
    )
    servers.append(server)
    if engine.has_died:
        server.should_exit = True
    # uvicorn raises the signals that it has handled once more when it is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    server.run()
    llm.close()
    if engine.has_died:
        print("kdecode serve: the engine broke; the log above says why", file=sys.stderr)
        return EXIT_BROKEN
    return 0


def check_address(host: str, port: int) -> None:
    """Raises InputError where nothing can listen there: before a model is opened for it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        socket.create_server(found[0][4][:2], family=found[0][0]).close()
    except OSError as error:
        raise InputError(
            f"This server cannot listen on {host}, port {port}: {error.strerror or error}."
        ) from error


def model_of(settings: dict[str, Any]) -> str | None:
    model = settings.get("model")
    if model is not None and not isinstance(model, str):
        raise InputError(f"model is {model!r} in the configuration; it must be a directory.")
    return model


def check_parsers(args: argparse.Namespace, directory: Path) -> None:
    """Raises InputError for parsers that are not the model's: replies have one format."""
    named = {
        "--reasoning-parser": args.reasoning_parser,
        "--tool-call-parser": args.tool_call_parser,
        "--enable-auto-tool-choice": args.enable_auto_tool_choice or None,
    }
    flags = [flag for flag, value in named.items() if value is not None]
    if not flags:
        return
    from kdecode.config import ModelConfig
    from kdecode.model.chat import chat_format
    from kdecode.model.tokenizer import Tokenizer

    vocab_size = ModelConfig.from_checkpoint(directory).vocab_size
    found = chat_format(Tokenizer.from_directory(directory, vocab_size))
    if found not in PARSERS:
        raise InputError(
            f"{flags[0]} does nothing for this model: its replies are in the format {found!r}, "
            "which has neither reasoning nor tool calls."
        )


def server_config(args: argparse.Namespace, directory: Path) -> ServerConfig:
    """The interface of these flags to the model in this directory."""
    from kdecode.server.api import ServerConfig
    from kdecode.server.guard import Limits

    return ServerConfig(
        served_names=args.served_model_name or [directory.resolve().name],
        api_keys=args.api_key,
        limits=Limits(max_body_bytes=args.max_body_bytes),
    )


def _stop(servers: list[uvicorn.Server]) -> None:
    for server in servers:
        server.should_exit = True


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine of these flags. Raises ConfigError, InputError."""
    return EngineConfig(
        decode_backend=_decode_backend(args),
        device=args.device,
        num_threads=args.threads,
        isa=args.isa,
        lossless_packing=args.lossless_packing,
        trunk_format=args.trunk_format,
        gpu_kernels=args.gpu_kernels,
        shared_experts=args.shared_experts,
        weight_prefetch=args.weight_prefetch,
        expert_products=args.expert_products,
        cache_dtype=CACHE_DTYPES[args.kv_cache_dtype],  # type: ignore[arg-type]
        cache_scale=args.cache_scale,
        page_tokens=args.block_size,
        max_context_tokens=args.max_model_len,
        max_requests=args.max_num_seqs,
        max_step_tokens=args.max_num_batched_tokens,
        seed=args.seed,
        speculative=args.speculative_config,
        enable_prefix_caching=args.enable_prefix_caching,
        state_interval_tokens=args.mamba_block_size,
        state_cache_bytes=args.state_cache_bytes,
        **rank_settings(args),
    )


def _decode_backend(args: argparse.Namespace) -> DecodeBackend:
    """The backend by its own flag or inside --additional-config; both only when they agree."""
    additional: dict[str, Any] = dict(args.additional_config)
    inside = additional.pop("decode_backend", None)
    if additional:
        raise InputError(
            f"--additional-config has {', '.join(map(repr, sorted(additional)))}; only "
            "'decode_backend' acts here."
        )
    if inside is not None and args.decode_backend not in (None, inside):
        raise InputError(
            f"--decode-backend is {args.decode_backend}, but --additional-config says {inside!r}."
        )
    backend: DecodeBackend = inside or args.decode_backend or EngineConfig().decode_backend
    return backend


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
