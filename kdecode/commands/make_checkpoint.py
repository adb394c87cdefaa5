"""`kdecode make-checkpoint`: seeded random weights in the released layout."""

from __future__ import annotations

import argparse
from typing import get_args

from kdecode.commands.common import InputError, ProgressBar

HELP = "write a checkpoint of seeded random weights in the released layout"
DESCRIPTION = (
    "The same preset and seed give the same bytes on every machine. With --draft, DIR becomes a "
    "draft for speculative decoding, for the model of that preset and seed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kdecode.config_draft import DraftKind
    from kdecode.model.presets import PRESETS

    parser.add_argument("directory", metavar="DIR", help="new directory of the checkpoint")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--draft", choices=get_args(DraftKind), help="write a draft in this publisher's layout"
    )


def run(args: argparse.Namespace) -> int:
    from kdecode.model.draft_synthesis import make_draft
    from kdecode.model.synthesis import make_checkpoint

    if not args.directory:
        raise InputError("DIR is empty; name the directory to make.")
    bar = ProgressBar()

    def progress(done: int, total: int) -> None:
        bar("tensors", done, total)

    try:
        if args.draft is None:
            make_checkpoint(args.directory, args.preset, args.seed, progress)
        else:
            make_draft(args.directory, args.preset, args.draft, args.seed, progress)
    except OSError as error:
        raise InputError(f"{args.directory} cannot be written: {error}") from error
    finally:
        bar.clear()
    kind = "" if args.draft is None else f", {args.draft} draft"
    print(f"{args.directory}: preset {args.preset}, seed {args.seed}{kind}")
    return 0
