"""The `kdecode` command: parsing, dispatch, and how errors end.

Owns the exit codes that are no command's own: 1 for an engine that lost a rank, 2 for usage and
input that cannot be served, 6 for output that cannot be written, 129, 130 and 143 for SIGHUP, an
interrupt and SIGTERM. Each command is a module of `kdecode/commands`; none of them imports torch
before its arguments are known to be good, and this module imports none of them before an interrupt
of that is taken care of.
"""

from __future__ import annotations

import sys

from kdecode.commands.process import (
    EndingSignals,
    OutputError,
    Streams,
    Terminated,
    end_quietly,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

EXIT_BROKEN = 1
EXIT_INPUT = 2
EXIT_OUTPUT = 6
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    import argparse

    from kdecode.commands import (
        bench,
        check,
        compare,
        eval,
        generate,
        make_checkpoint,
        plan,
        serve,
    )
    from kdecode.commands.help_format import HelpFormatter

    parser = argparse.ArgumentParser(
        prog="kdecode",
        description="Runs models of the Kimi K3 family and compares their two decode backends.",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="log what the engine does, on stderr"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (generate, serve, plan, check, compare, eval, bench, make_checkpoint):
        name = command.__name__.rsplit(".", 1)[1].replace("_", "-")
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP + ". " + command.DESCRIPTION,
            formatter_class=HelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    with Streams() as streams, EndingSignals():
        try:
            code = _run(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            print("\nkdecode: interrupted", file=sys.stderr)
            code = EXIT_INTERRUPTED
        except Terminated as ended:
            code = ended.exit_code
        except OSError:
            if streams.output_error() is None:
                raise
            code = EXIT_OUTPUT
        problem = streams.output_error()
        if problem is not None and code in (0, EXIT_OUTPUT):
            code = EXIT_OUTPUT
            # A reader that has gone, as `head` does, is not told that it has.
            if not isinstance(problem, BrokenPipeError):
                print(f"kdecode: error: the output cannot be written: {problem}", file=sys.stderr)
    if argv is None:
        end_quietly(code)
    return code


def _run(argv: Sequence[str]) -> int:
    """The command's exit code, or the one of input that cannot be served."""
    import logging

    from kdecode.commands import config_file
    from kdecode.commands.common import InputError

    try:
        args = build_parser().parse_args(config_file.expand("serve", argv))
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
    except OutputError as error:
        print(f"kdecode {args.command}: error: {error}", file=sys.stderr)
        return EXIT_OUTPUT
    except Exception as error:
        explained = _code_of(error)
        if explained is None:
            raise
        print(f"kdecode {args.command}: error: {error}", file=sys.stderr)
        return explained


def _code_of(error: Exception) -> int | None:
    """The exit code of an error that its text explains; None for a fault, which is shown whole."""
    from kdecode.parallel.ranks import RankError

    if isinstance(error, RankError):
        return EXIT_BROKEN
    # A file that cannot be used names itself; other errors of the system are faults.
    is_file = isinstance(error, OSError) and error.filename is not None
    return EXIT_INPUT if is_file or isinstance(error, _input_errors()) else None


def _input_errors() -> tuple[type[Exception], ...]:
    """Errors that the caller's input explains; any other one is a fault and keeps its traceback."""
    from kdecode.commands.common import InputError
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
