"""`kdecode bench layer --shape`: a release's first layers with random weights, on both backends.

Owns what of a release is timed: one rank's share alone, without what the ranks would exchange, or
on GPUs all ranks together. What is printed of a plan's costs is `bench_layer`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands.bench_layer import DEFAULT_LAYERS, read_probe, timed
from kdecode.commands.common import InputError, ProgressBar, engine_config
from kdecode.config import (
    OF_GPU_PLANS,
    DecodeBackend,
    EngineConfig,
    ModelConfig,
    torch_run,
)

if TYPE_CHECKING:
    from kdecode.decode.inspect import PlanCost

# What a shape leaves out, in every text and document that has its figures.
SHAPE_NOTE = "random weights"
RANKS_NOTE = {
    "cpu": "one rank's steps with random weights, as if it never had to wait for another: what "
    "others would give is zeros, and auto does not add them up",
    "cuda": "one rank's arithmetic with random weights; the exchanges between ranks are not in it, "
    "and the router and both latent projections are whole on every rank",
    "ranks": "a GPU each, random weights, exchanges in them; times are of every run the slowest "
    "rank's, from when all have come to its beginning; bytes are one rank's, and the floor is its",
}


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text."""
    size, rank, has_all = _ranks(args)
    document, texts = _bytes(args.shape, size) if size > 1 or args.bytes else ({}, [])
    if args.bytes:
        return document, "\n\n".join(texts)
    layers = args.layers or DEFAULT_LAYERS
    note = SHAPE_NOTE
    if size > 1:
        note = RANKS_NOTE["ranks" if has_all else args.device.partition(":")[0]]
    which = f"all {size} ranks" if has_all else f"rank {rank} of {size}"
    texts.append(f"{args.shape}, layers 0 to {layers - 1}, {which}: {note}.")
    shape = {"name": args.shape, "layers": layers, "tensor_parallel_size": size}
    document["shape"] = {**shape, "rank": None if has_all else rank, "note": note}
    backends = (args.decode_backend,) if args.decode_backend else get_args(DecodeBackend)
    configs = [
        shape_config(args, backend, len(backends), size if has_all else 1) for backend in backends
    ]
    document["backends"] = []
    for part, text in _times(args, configs, rank, size):
        document["backends"].append(part)
        texts.append(text)
    return document, "\n\n".join(texts)


def _ranks(args: argparse.Namespace) -> tuple[int, int, bool]:
    """How many ranks there are, whose share is timed, and whether all are. Raises InputError."""
    if args.drafts is not None:
        raise InputError("--drafts needs a MODEL; a --shape has no step that verifies them.")
    if args.model is not None:
        raise InputError(f"A model, {args.model}, and a --shape were given; one of them is timed.")
    together, share = args.tensor_parallel_size, args.rank_share
    if together and share:
        raise InputError(
            f"--tensor-parallel-size is {together} and --rank-share {share}; give one of them."
        )
    size, rank = share or together or 1, args.rank or 0
    if not 0 <= rank < size:
        raise InputError(f"--rank is {rank}; with {size} ranks it must be from 0 to {size - 1}.")
    if args.bytes and args.gpu_exchange != "auto":
        raise InputError(
            f"--gpu-exchange is {args.gpu_exchange!r} and --bytes given, which exchanges nothing; "
            "leave one of them out."
        )
    if args.bytes or args.device == "cpu" or share or size == 1:
        return size, rank, False
    if args.rank is not None:
        raise InputError(
            f"--rank is {rank}; of --tensor-parallel-size {size} all ranks are timed, and "
            "--rank-share times one alone."
        )
    if torch_run() is not None:
        raise InputError(
            "bench layer starts the ranks of a host by itself; it cannot be one that torchrun has "
            "started."
        )
    return size, rank, True


def shape_config(
    args: argparse.Namespace, backend: DecodeBackend, num_backends: int, num_ranks: int = 1
) -> EngineConfig:
    """Of one of the backends that are timed; where both are, each has what it can be told.

    num_ranks: that are timed together.
    """
    plain = OF_GPU_PLANS if backend == "auto" and num_backends > 1 else {}
    return engine_config(
        args,
        decode_backend=backend,
        max_context_tokens=args.context_tokens,
        max_requests=args.rows,
        tensor_parallel_size=num_ranks,
        gpu_exchange=args.gpu_exchange,
        **plain,
    )


def _times(
    args: argparse.Namespace, configs: list[EngineConfig], rank: int, size: int
) -> list[tuple[dict[str, Any], str]]:
    """Of each backend the document and the text."""
    from kdecode.model.rank_share import release_config

    whole = release_config(args.shape, args.layers or DEFAULT_LAYERS)
    # The memory's speed is taken on the device before anything else looks for it.
    if configs[0].tensor_parallel_size > 1:
        from kdecode.engine.ranked_probe import check_ranks, inspect_ranks

        for config in configs:
            check_ranks(whole, config)

        def inspect(config: EngineConfig, bar: ProgressBar) -> PlanCost:
            return inspect_ranks(whole, config, args.rows, args.runs, _packing(bar))
    else:
        from kdecode.engine.preflight import check_device
        from kdecode.engine.shape_probe import inspect_shape

        check_device(args.device)

        def inspect(config: EngineConfig, bar: ProgressBar) -> PlanCost:
            rows, runs = args.rows, args.runs
            return inspect_shape(whole, config, rows, runs, rank, _packing(bar), size)

    return [
        timed(read_probe(config), config, partial(inspect, config, ProgressBar()))
        for config in configs
    ]


def _packing(bar: ProgressBar) -> Callable[[int, int], None]:
    return lambda done, total: bar("packing", done, total)


def _bytes(name: str, size: int) -> tuple[dict[str, Any], list[str]]:
    """What ranks have of a whole release."""
    from kdecode.commands.bench_ranks import bytes_document, bytes_text
    from kdecode.model.presets import RELEASES, released_config
    from kdecode.model.rank_bytes import rank_bytes

    kinds = rank_bytes(ModelConfig.from_checkpoint(released_config(RELEASES[name])), size)
    return {"rank_bytes": bytes_document(kinds)}, [bytes_text(name, kinds)]
