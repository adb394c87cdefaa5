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
    from kdecode.parallel.ranks import Ranks

    model = ModelConfig.from_checkpoint(source)
    size = config.tensor_parallel_size
    each = 1 + (args.drafts or 0)
    share, ranks = share_of(model, size), Ranks(0, size)
    plan = describe_launches(share, config, args.arch, args.rows * each, each, ranks)
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
    share = f", one rank of {size}" if size > 1 else ""
    exchanges = sum(bool(line.moves) for line in lines)
    between = f" and {exchanges:,} exchanges between ranks" if size > 1 else ""
    return "\n".join(
        [
            f"backend {plan.backend} on {arch}, {counted(plan.rows or 0, 'row')}, "
            f"{plan.rows_per_request} a request{share}",
            table(launch_rows(groups)),
            "",
            table(_count_rows(groups, size)),
            f"{len(lines) - exchanges:,} launches{between}, {mebibytes(weights)} of weights at one "
            "row",
            *plan.notes,
        ]
    )


def _count_rows(groups: list[LaunchGroup], size: int) -> list[tuple[str, ...]]:
    """Launches a layer; of several ranks also its exchanges."""
    head = ("kind of layer", "layers", "first", "launches")
    rows = [(*head, "exchanges between ranks") if size > 1 else head]
    for group in groups:
        if not group.layers:
            continue
        moved = [column[0].moves for column in group.columns if column[0].moves]
        launched = len(group.columns) - len(moved)
        cells = (group.name, str(len(group.layers)), str(group.layers[0]), str(launched))
        named = "; ".join(moves.partition(",")[0] for moves in moved)
        rows.append((*cells, f"{len(moved)}: {named}") if size > 1 else cells)
    return rows
