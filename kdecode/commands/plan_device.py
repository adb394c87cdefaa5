"""`kdecode plan --device cuda --arch ARCH`: the launches of a CUDA plan, for any architecture.

Owns the arguments and the printing. The plan is made from a configuration, on no device: neither
weights nor a GPU nor a driver are needed, and with --compile its kernels are compiled all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdecode.bench.wording import counted
from kdecode.commands.common import InputError, mebibytes, table
from kdecode.config import EngineConfig, GpuExchange, ModelConfig, environment

if TYPE_CHECKING:
    from kdecode.decode.launches import LaunchGroup, LaunchLine
    from kdecode.decode.plan import DecodePlan
    from kdecode.engine.describe_draft import DraftLaunches

# By the setting, as it is printed.
_TRANSPORTS = {"nccl": "through NCCL", "symmetric": "through symmetric memory"}
# Behind it where nobody has chosen: whether the GPUs share memory, only they can tell.
_ASSUMED = ", where the GPUs have it; else --gpu-exchange nccl shows what runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a CUDA plan, without the GPU")
    group.add_argument("--arch", metavar="ARCH", help="sm_90, sm_100 or sm_103; its launches")
    group.add_argument(
        "--compile",
        action="store_true",
        help="registers, spilled bytes and shared memory of every kernel",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raises InputError for what does not belong together."""
    if args.arch is None:
        if args.compile:
            raise InputError("--compile needs an --arch.")
        return
    if args.device != "cuda":
        raise InputError(f"--arch is of a GPU; --device is {args.device}, and has to be cuda.")
    if args.decode_backend == "auto":
        raise InputError("--arch is for the kernels of latency_specialized; auto has no plan.")
    if args.num_context_ranks > 1:
        raise InputError("--arch has no plan of ranks that share positions.")


def run(source: Path, args: argparse.Namespace, config: EngineConfig) -> tuple[dict[str, Any], str]:
    """The document and the text. Raises InputError, ConfigError and BackendRefusedError."""
    from kdecode.decode.launches import compile_lines, launch_lines, too_large
    from kdecode.engine.describe import describe_launches
    from kdecode.model.rank_share import share_of
    from kdecode.parallel.ranks import Ranks

    model = ModelConfig.from_checkpoint(source)
    size = config.tensor_parallel_size
    each = 1 + (args.drafts or 0)
    share, ranks = share_of(model, size), Ranks(0, size)
    plan = describe_launches(share, config, args.arch, args.rows * each, each, ranks)
    lines = _compiled(args, config, plan, compile_lines) if args.compile else launch_lines(plan)
    transport = transport_of(lines)
    document = {
        "backend": plan.backend,
        "arch": args.arch,
        "tensor_parallel_size": size,
        "gpu_exchange": transport,
        "gpu_exchange_is_assumed": transport is not None and config.gpu_exchange == "auto",
        "rows": plan.rows,
        "rows_per_request": each,
        "launches": [dataclasses.asdict(line) for line in lines],
        "cannot_launch": too_large(lines, args.arch),
    }
    text = text_of(plan, lines, args.arch, size, config.gpu_exchange)
    if config.speculative is not None:
        document["draft"], of_draft = _draft(model, args, config)
        text += f"\n\n{of_draft}"
    return document, text


def _compiled(
    args: argparse.Namespace,
    config: EngineConfig,
    launched: Any,
    compiler: Callable[..., list[LaunchLine]],
) -> list[LaunchLine]:
    """Raises InputError for what cannot be compiled."""
    folder, processes = environment().cache_dir / "compiled", config.resolved_threads()
    try:
        return compiler(launched, args.arch, folder, processes)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"the plan cannot be compiled: {error}") from error


def _draft(
    target: ModelConfig, args: argparse.Namespace, config: EngineConfig
) -> tuple[dict[str, Any], str]:
    """The same of the draft: its block and its committed tokens, or why it has no plans."""
    from kdecode.decode.latency_specialized import BackendRefusedError
    from kdecode.decode.launches import (
        compile_lines,
        compile_steps,
        launch_lines,
        step_lines,
        too_large,
    )
    from kdecode.engine.describe_draft import describe_draft_launches
    from kdecode.engine.speculation import draft_config

    speculative = config.speculative
    assert speculative is not None
    draft = draft_config(config, target)
    assert draft is not None
    count = speculative.num_speculative_tokens
    try:
        found = describe_draft_launches(target, config, draft, args.arch, args.rows, count)
    except BackendRefusedError as error:
        return {"refusals": [*error.reasons]}, f"the draft runs in torch: {' '.join(error.reasons)}"
    except ValueError as error:
        raise InputError(f"the draft has no plan of {args.rows} requests: {error}") from error
    if args.compile:
        block = _compiled(args, config, found.block, compile_lines)
        context = _compiled(args, config, found.context, compile_steps)
    else:
        block, context = launch_lines(found.block), step_lines(found.context)
    document = {
        "rows": found.block.rows,
        "rows_per_request": count,
        "launches": [dataclasses.asdict(line) for line in block],
        "context_rows": found.context_rows,
        "context_launches": [dataclasses.asdict(line) for line in context],
        "cannot_launch": too_large([*block, *context], args.arch),
        "refusals": [],
    }
    return document, draft_text_of(found, block, context, args.arch)


def draft_text_of(
    found: DraftLaunches, block: list[LaunchLine], context: list[LaunchLine], arch: str
) -> str:
    """The launches of a draft's block, and of what caches committed tokens."""
    from kdecode.decode.launches import group_lines, launch_rows, too_large

    groups = group_lines(found.block.config, context)
    weights = sum(step.weight_bytes or 0 for step in found.context)
    return "\n".join(
        [
            f"the draft: {text_of(found.block, block, arch, 1)}",
            "",
            f"the draft's committed tokens, {counted(found.context_rows, 'row')}",
            table(launch_rows(groups, arch)),
            f"{len(context):,} launches, {mebibytes(weights)} of weights",
            *too_large(context, arch),
        ]
    )


def text_of(
    plan: DecodePlan,
    lines: list[LaunchLine],
    arch: str,
    size: int,
    gpu_exchange: GpuExchange = "auto",
) -> str:
    """The launches of each kind of layer, and how many there are. gpu_exchange: as it was set."""
    from kdecode.decode.launches import group_lines, launch_rows, too_large

    groups = group_lines(plan.config, lines)
    weights = sum(step.weight_bytes or 0 for step in plan.steps)
    launched = sum(line.is_launch for line in lines)
    transport = transport_of(lines)
    share, between = (f", one rank of {size}" if size > 1 else ""), ""
    if transport is not None:
        share += f", {_TRANSPORTS[transport]}{_ASSUMED if gpu_exchange == 'auto' else ''}"
        exchanges = f"{sum(bool(line.moves) for line in lines):,} exchanges between ranks"
        between = f" and {exchanges}" if launched < len(lines) else f", with {exchanges} in them"
    return "\n".join(
        [
            f"backend {plan.backend} on {arch}, {counted(plan.rows or 0, 'row')}, "
            f"{plan.rows_per_request} a request{share}",
            table(launch_rows(groups, arch)),
            "",
            table(_count_rows(groups, size)),
            f"{launched:,} launches{between}, {mebibytes(weights)} of weights at one row",
            *plan.notes,
            *too_large(lines, arch),
        ]
    )


def transport_of(lines: Sequence[LaunchLine]) -> str | None:
    """What the launches' values go between ranks through; None where nothing does."""
    if not any(line.moves for line in lines):
        return None
    return "symmetric" if all(line.is_launch for line in lines) else "nccl"


def _count_rows(groups: list[LaunchGroup], size: int) -> list[tuple[str, ...]]:
    """Launches a layer; of several ranks also its exchanges."""
    head = ("kind of layer", "layers", "first", "launches")
    rows = [(*head, "exchanges between ranks") if size > 1 else head]
    for group in groups:
        if not group.layers:
            continue
        moved = [column[0].moves for column in group.columns if column[0].moves]
        launched = sum(column[0].is_launch for column in group.columns)
        cells = (group.name, str(len(group.layers)), str(group.layers[0]), str(launched))
        named = "; ".join(moves.partition(",")[0] for moves in moved)
        rows.append((*cells, f"{len(moved)}: {named}") if size > 1 else cells)
    return rows
