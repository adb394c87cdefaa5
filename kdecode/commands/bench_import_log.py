"""`kdecode bench import-log`: an access log as a trace without texts.

Owns the arguments; what is taken over is `bench.workloads.access_log`'s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kdecode.commands.common import InputError, check_output_file
from kdecode.commands.process import OutputError

HELP = "make a trace of an access log that keeps times, lengths and block hashes alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="JSON lines with times and token counts")
    parser.add_argument("trace", metavar="TRACE", help="the Mooncake trace to write")
    parser.add_argument("--json", action="store_true", help="one JSON document about it instead")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.bench.workloads.access_log import import_log
    from kdecode.bench.workloads.types import WorkloadError

    check_output_file(args.trace)
    read = 0

    def counted(lines: Iterable[str]) -> Iterator[str]:
        nonlocal read
        for line in lines:
            read += bool(line.strip())
            yield line

    try:
        with Path(args.log).open(encoding="utf-8") as lines:
            entries = list(import_log(counted(lines)))
    except (OSError, UnicodeDecodeError, WorkloadError) as error:
        raise InputError(f"{args.log} cannot be imported: {error}") from error
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    try:
        Path(args.trace).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{args.trace} cannot be written: {error}") from error
    document = {
        "requests": len(entries),
        "without_prompt": read - len(entries),
        "without_reply": sum(entry["output_length"] == 0 for entry in entries),
        "prompt_tokens": sum(entry["input_length"] for entry in entries),
        "output_tokens": sum(entry["output_length"] for entry in entries),
        "blocks": len({block for entry in entries for block in entry.get("hash_ids", ())}),
    }
    return document, (
        f"left out: {document['without_prompt']} without a prompt; "
        f"{document['without_reply']} without a reply, which are played as one token\n"
        f"{document['requests']} requests with {document['prompt_tokens']:,} prompt tokens and "
        f"{document['output_tokens']:,} output tokens, {document['blocks']} different blocks"
    )
