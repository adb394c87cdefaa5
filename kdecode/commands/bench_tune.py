"""`kdecode bench tune`: the fastest tiles of the CUDA plans on this GPU, written into their table.

Owns the arguments, what an entry says of its measurement, and which entries stay: those of other
kernels, architectures and shapes do.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdecode.bench.wording import counted
from kdecode.commands import bench_layer
from kdecode.commands.common import (
    InputError,
    ProgressBar,
    add_engine_arguments,
    check_output_file,
    engine_config,
    positive,
    table,
)

if TYPE_CHECKING:
    from kdecode.decode.tune import Tuned

HELP = "find the fastest tiles of the CUDA plans and write them into the tile table"


def add_arguments(part: argparse.ArgumentParser) -> None:
    part.add_argument("--shape", choices=bench_layer.SHAPES, default=bench_layer.SHAPES[0])
    part.add_argument(
        "--tensor-parallel-size",
        "--rank-share",
        type=positive,
        metavar="N",
        default=16,
        help="ranks, of which one's share is tuned",
    )
    part.add_argument("--rows", type=positive, nargs="+", default=[1, 8], help="of each plan")
    part.add_argument(
        "--context-tokens", type=positive, default=2048, help="tokens in each request's cache"
    )
    part.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only these; default: all"
    )
    part.add_argument("--output", metavar="PATH", help="default: the table of this installation")
    part.add_argument("--json", action="store_true", help="one JSON document instead")
    add_engine_arguments(part, has_backend=False)
    part.set_defaults(device="cuda")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text. The table is written where any tile is better than before."""
    from kdecode.engine.shape_probe import tune_shape
    from kdecode.kernels.common import tile_table
    from kdecode.model.rank_share import release_config, share_of

    if args.device == "cpu":
        raise InputError("Tiles are of kernels for a GPU; --device is cpu.")
    path = tile_table.PATH if args.output is None else Path(args.output)
    check_output_file(str(path))
    config = engine_config(
        args,
        decode_backend="latency_specialized",
        max_context_tokens=args.context_tokens,
        max_requests=max(args.rows),
    )
    whole = release_config(args.shape, bench_layer.DEFAULT_LAYERS)
    share = share_of(whole, args.tensor_parallel_size)
    bar = ProgressBar()
    found = list(
        tune_shape(share, config, args.rows, args.kernel, lambda d, n: bar("packing", d, n))
    )
    entries = dict(tile_table.table())
    measured = _measured(args)
    for entry in found:
        if entry.is_better:
            told = (
                f"{measured}: {entry.microseconds:.2f} us; {_tile(entry.first)} "
                f"{entry.first_microseconds:.2f} us"
            )
            tile = dataclasses.asdict(entry.tile)
            entries[entry.key] = tile_table.TileEntry(entry.key, tile, told)
    better = sum(entry.is_better for entry in found)
    if better:
        tile_table.write_table(path, list(entries.values()))
    text = "\n".join(
        [
            table([("kernel", "shape", "before", "us", "now", "us", "tried"), *map(_row, found)]),
            f"{counted(better, 'tile')} of {len(found)} changed" + (f": {path}" if better else ""),
        ]
    )
    return {"tuned": [dataclasses.asdict(entry) for entry in found], "table": str(path)}, text


def _measured(args: argparse.Namespace) -> str:
    import datetime

    import torch
    import triton

    name = torch.cuda.get_device_name(args.device)
    return f"{name}, Triton {triton.__version__}, {datetime.date.today()}"


def _row(entry: Tuned) -> tuple[str, ...]:
    return (
        entry.key.kernel,
        entry.key.shape,
        _tile(entry.first),
        f"{entry.first_microseconds:.2f}",
        _tile(entry.tile) if entry.is_better else "the same",
        f"{entry.microseconds:.2f}",
        str(entry.tried),
    )


def _tile(tile: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(tile).items())
