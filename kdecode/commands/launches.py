"""Which servers `kdecode compare` starts itself: two of ours, or those of a recipe.

Owns the command lines of ours and the reading of recipes. Running them is `bench.serving.launch`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kdecode.commands.common import InputError, context_tokens, model_directory
from kdecode.commands.compare_flags import check_backends

if TYPE_CHECKING:
    from kdecode.bench.serving.launch import Launch

ARMS = ("a", "b")
# What a recipe may say of how it is measured: flags of `kdecode compare`, by their names.
_FLAGS = (
    *("prompts", "prompt_tokens", "output_tokens", "blocks", "concurrency", "rate", "cache"),
    *("seed", "model_a", "model_b", "token_ids", "timeout", "workload", "workload_format"),
    *("agentic", "sessions", "max_pause", "own_times", "speed", "sweep_concurrency"),
    *("sweep_prompt_tokens", "restart"),
)
_SWITCHES = ("agentic", "own_times")
_LISTS = ("sweep_concurrency", "sweep_prompt_tokens")
_ARM_KEYS = {"command", "url", "environment", "ready_s"}


def own_servers(args: argparse.Namespace, longest_request: int) -> tuple[Launch, Launch]:
    """`kdecode serve` once for each backend, with the engine flags of the comparison.

    longest_request: tokens of a prompt with its reply that have to fit.
    """
    from kdecode.bench.serving.launch import Launch, free_ports

    check_backends(args)
    directory = model_directory(args)
    flags = {
        "--device": args.device,
        "--threads": args.threads,
        "--isa": args.isa,
        "--lossless-packing": args.lossless_packing,
        "--gpu-kernels": args.gpu_kernels,
        "--shared-experts": args.shared_experts,
        "--weight-prefetch": args.weight_prefetch,
        "--expert-products": args.expert_products,
        "--kv-cache-dtype": {"bf16": "auto"}.get(args.cache_dtype, args.cache_dtype),
        "--cache-scale": args.cache_scale,
        "--block-size": args.page_tokens,
        "--seed": args.engine_seed,
        "--max-num-seqs": args.concurrency or 1,
        "--max-model-len": context_tokens(longest_request),
        "--speculative-config": _speculative(args),
    }
    if args.num_ranks > 1:
        flags |= {
            "--tensor-parallel-size": args.num_ranks,
            "--gpu-exchange": args.gpu_exchange,
            "--decode-context-parallel-size": args.num_context_ranks,
            "--dcp-kv-cache-interleave-size": args.context_interleave,
            "--rank-timeout-seconds": args.rank_timeout_seconds,
        }
    given = [text for flag, v in flags.items() if v is not None for text in (flag, str(v))]
    launches = []
    ports = free_ports(len(ARMS))
    for name, backend, port in zip(ARMS, (args.arm_a, args.arm_b), ports, strict=True):
        command = [sys.executable, "-P", "-m", "kdecode.cli", "serve", str(directory), *given]
        command += ["--decode-backend", backend, "--port", str(port)]
        launches.append(Launch(name, command, f"http://127.0.0.1:{port}"))
    return launches[0], launches[1]


def _speculative(args: argparse.Namespace) -> str | None:
    if args.speculative_config is None:
        return None
    fields = dataclasses.asdict(args.speculative_config)
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def recipe_servers(args: argparse.Namespace) -> tuple[Launch, Launch]:
    """The servers of a recipe; what it says of the measurement goes into `args`."""
    from kdecode.bench.serving.launch import Launch

    recipe = _read(args.recipe)
    unknown = set(recipe) - {"description", "arms", "compare"}
    arms, flags = recipe.get("arms"), recipe.get("compare") or {}
    has_arms = isinstance(arms, Mapping) and set(arms) == set(ARMS)
    if unknown or not has_arms or not isinstance(flags, Mapping):
        raise InputError(
            f"{args.recipe} must have `arms` with `a` and `b`, and may have `description` and "
            f"`compare`; it has {', '.join(map(str, recipe)) or 'nothing'}."
        )
    for name, value in flags.items():
        key = str(name).replace("-", "_")
        if key not in _FLAGS:
            raise InputError(f"{args.recipe}: compare.{name} is no flag that a recipe may have.")
        try:
            setattr(args, key, _flag_value(key, value))
        except InputError as error:
            raise InputError(f"{args.recipe}: compare.{name}: {error}") from error
    launches = []
    for name in ARMS:
        arm = recipe["arms"][name]
        if not _is_arm(arm):
            raise InputError(
                f"{args.recipe}: arms.{name} needs `command`, a list, and `url`, and may have "
                "`environment`, a mapping, and `ready_s`, a number of seconds above 0."
            )
        launches.append(
            Launch(
                name,
                [str(word) for word in arm["command"]],
                str(arm["url"]),
                {str(key): str(value) for key, value in (arm.get("environment") or {}).items()},
                float(arm.get("ready_s", 600)),
            )
        )
    return launches[0], launches[1]


class _FlagParser(argparse.ArgumentParser):
    """Of the flags of `kdecode compare`; what it refuses is an InputError."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _flag_value(key: str, value: Any) -> Any:
    """What the command line would have made of it. Raises InputError."""
    from kdecode.commands import compare

    flag, is_switch = f"--{key.replace('_', '-')}", key in _SWITCHES
    is_list = isinstance(value, list)
    is_other = isinstance(value, Mapping) or value is None or (is_list and key not in _LISTS)
    if is_other or isinstance(value, bool) != is_switch:
        kind = "true or false" if is_switch else "a value" if key not in _LISTS else "values"
        raise InputError(f"it is {value!r}; {flag} takes {kind}.")
    if is_switch:
        return value
    words = [flag, *map(str, value)] if is_list else [f"{flag}={value}"]
    parser = _FlagParser(add_help=False, allow_abbrev=False)
    compare.add_arguments(parser)
    return getattr(parser.parse_args(words), key)


def _is_arm(arm: Any) -> bool:
    if not isinstance(arm, Mapping) or set(arm) - _ARM_KEYS or "url" not in arm:
        return False
    ready_s = arm.get("ready_s", 1)
    has_time = isinstance(ready_s, int | float) and 0 < ready_s < math.inf
    has_command = isinstance(arm.get("command"), list) and bool(arm["command"])
    return has_command and has_time and isinstance(arm.get("environment") or {}, Mapping)


def _read(path: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InputError(
            "yaml is not installed; recipes need `pip install 'kdecode[eval]'`."
        ) from error
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the recipe {path} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise InputError(f"the recipe {path} is no mapping.")
    return found
