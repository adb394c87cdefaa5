"""`kdecode plan --device cuda --arch ARCH`: the launches of a CUDA plan, for any architecture.

Owns the arguments and the printing. The plan is made from a configuration, on no device: neither
weights nor a GPU nor a driver are needed, and with --compile its kernels are compiled all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdecode.bench.wording import counted
from kdecode.commands.common import InputError, mebibytes, table
from kdecode.config import EngineConfig, ModelConfig, environment

if TYPE_CHECKING:
    from kdecode.decode.launches import LaunchGroup, LaunchLine
    from kdecode.decode.plan import DecodePlan


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
    if args.speculative_config is not None:
        raise InputError("--arch has no plan of a draft; give --drafts for the verify step.")


def run(source: Path, args: argparse.Namespace, config: EngineConfig) -> tuple[dict[str, Any], str]:
    """The document and the text. Raises InputError, ConfigError and BackendRefusedError."""
    from kdecode.decode.launches import compile_lines, launch_lines
    from kdecode.engine.describe import describe_launches
    from kdecode.model.rank_share import share_of

    model = ModelConfig.from_checkpoint(source)
    size = config.tensor_parallel_size
    each = 1 + (args.drafts or 0)
    plan = describe_launches(share_of(model, size), config, args.arch, args.rows * each, each)
    if args.compile:
        folder, processes = environment().cache_dir / "compiled", config.resolved_threads()
        try:
            lines = compile_lines(plan, args.arch, folder, processes)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"the plan cannot be compiled: {error}") from error
    else:
        lines = launch_lines(plan)
    document = {
        "backend": plan.backend,
        "arch": args.arch,
        "tensor_parallel_size": size,
        "rows": plan.rows,
        "rows_per_request": each,
        "launches": [dataclasses.asdict(line) for line in lines],
    }
    return document, text_of(plan, lines, args.arch, size)


def text_of(plan: DecodePlan, lines: list[LaunchLine], arch: str, size: int) -> str:
    """The launches of each kind of layer, and how many there are."""
    from kdecode.decode.launches import group_lines, launch_rows

    groups = group_lines(plan.config, lines)
    weights = sum(step.weight_bytes or 0 for step in plan.steps)
    share = f", one rank's share of {size}" if size > 1 else ""
    return "\n".join(
        [
            f"backend {plan.backend} on {arch}, {counted(plan.rows or 0, 'row')}, "
            f"{plan.rows_per_request} a request{share}",
            table(launch_rows(groups)),
            "",
            table(_count_rows(plan.config, groups, size)),
            f"{len(lines):,} launches, {mebibytes(weights)} of weights at one row",
            *plan.notes,
        ]
    )


def _count_rows(config: ModelConfig, groups: list[LaunchGroup], size: int) -> list[tuple[str, ...]]:
    """Launches a layer; of several ranks also how often these would exchange a sum."""
    from kdecode.model.rank_share import reduced_buffers

    head = ("kind of layer", "layers", "first", "launches")
    rows = [(*head, "exchanges between ranks, not in this plan") if size > 1 else head]
    for group in groups:
        if not group.layers:
            continue
        first = group.layers[0]
        cells = (group.name, str(len(group.layers)), str(first), str(len(group.columns)))
        exchanged = reduced_buffers(config, first)
        rows.append((*cells, f"{len(exchanged)}: {' '.join(exchanged)}") if size > 1 else cells)
    return rows
