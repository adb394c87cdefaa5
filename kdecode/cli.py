"""The `kdecode` command: parsing, dispatch, and how errors end.

Owns the exit codes that are no command's own: 2 for usage and input that cannot be served, 130 for
an interrupt. Each command is a module of `kdecode/commands`; none of them imports torch before its
arguments are known to be good.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kdecode.commands import bench, check, compare, generate, make_checkpoint, plan, serve
from kdecode.commands import config_file as config_files
from kdecode.commands.common import InputError

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130

_COMMANDS = (generate, serve, plan, check, compare, bench, make_checkpoint)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdecode",
        description="Runs models of the Kimi K3 family and compares their two decode backends.",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="log what the engine does, on stderr"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        name = command.__name__.rsplit(".", 1)[1].replace("_", "-")
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP + ". " + command.DESCRIPTION,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        given = sys.argv[1:] if argv is None else argv
        args = build_parser().parse_args(config_files.expand("serve", given))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_INPUT
    except InputError as error:
        print(f"kdecode: error: {error}", file=sys.stderr)
        return EXIT_INPUT
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nkdecode: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; nothing can be told to it, nor at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # A file that cannot be used names itself; other errors of the system are faults.
        is_file = isinstance(error, OSError) and error.filename is not None
        if not is_file and not isinstance(error, _input_errors()):
            raise
        print(f"kdecode {args.command}: error: {error}", file=sys.stderr)
        return EXIT_INPUT


def _input_errors() -> tuple[type[Exception], ...]:
    """Errors that the caller's input explains; any other one is a fault and keeps its traceback."""
    from kdecode.config import ConfigError
    from kdecode.decode.latency_specialized import BackendRefusedError
    from kdecode.engine.request import RequestError
    from kdecode.model.chat import ChatError
    from kdecode.model.shards import CheckpointError
    from kdecode.model.tokenizer import TokenizerError

    return (
        BackendRefusedError,
        ChatError,
        CheckpointError,
        ConfigError,
        InputError,
        RequestError,
        TokenizerError,
    )


if __name__ == "__main__":
    sys.exit(main())
