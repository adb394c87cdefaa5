"""`kdecode serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def started(process: subprocess.Popen[str]) -> str:
    """The server's address, once it listens."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if match := re.search(r"running on (http://\S+)", line):
            return match[1]
    raise AssertionError("".join(seen))


def start(checkpoint: Path, *flags: str, before: str = "") -> tuple[subprocess.Popen[str], str]:
    """The command as a process, and its address; before: code that it runs first."""
    argv = ["serve", str(checkpoint), "--port", "0", "--threads", "1", *flags]
    code = f"import sys\nfrom kdecode import cli\n{before}\nsys.exit(cli.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *argv], stderr=subprocess.PIPE, text=True
    )
    return process, started(process)


@contextmanager
def running(
    checkpoint: Path, *flags: str, before: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its address; it is gone afterwards."""
    names = ("--served-model-name", "mini")
    process, url = start(checkpoint, *names, *flags, before=before)
    try:
        yield process, url
    finally:
        process.kill()
        process.communicate()
