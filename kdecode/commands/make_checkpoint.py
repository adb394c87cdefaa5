"""`kdecode make-checkpoint`: seeded random weights in the released layout."""

from __future__ import annotations

import argparse

from kdecode.commands.common import InputError, ProgressBar

HELP = "write a checkpoint of seeded random weights in the released layout"
DESCRIPTION = "The same preset and seed give the same bytes on every machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kdecode.model.presets import PRESETS

    parser.add_argument("directory", metavar="DIR", help="new directory of the checkpoint")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="small")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    from kdecode.model.synthesis import make_checkpoint

    bar = ProgressBar()
    try:
        make_checkpoint(
            args.directory, args.preset, args.seed, lambda done, total: bar("tensors", done, total)
        )
    except OSError as error:
        raise InputError(f"{args.directory} cannot be written: {error}") from error
    print(f"{args.directory}: preset {args.preset}, seed {args.seed}")
    return 0
