"""The command as a process: signals at any moment, and standard streams that take nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdecode.cli import main

ENGINE = ["--threads", "1", "--page-tokens", "16"]


def _python(script: str, *args: object, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a script; shell: redirections behind the command."""
    command = [sys.executable, "-P", "-c", script, *map(str, args)]
    if shell:
        command = ["bash", "-c", f'"$@" {shell}', "bash", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# Sends a signal to itself when the 20th tensor is made; "ignore" starts as under nohup.
_MAKES = """
import os, signal, sys
number = int(sys.argv[1])
if "ignore" in sys.argv:
    signal.signal(number, signal.SIG_IGN)
from kdecode.model import draft_synthesis, synthesis
make, made = synthesis.make_tensor, []
def make_tensor(*args):
    made.append(args)
    if len(made) == 20:
        os.kill(os.getpid(), number)
    return make(*args)
synthesis.make_tensor = draft_synthesis.make_tensor = make_tensor
sys.argv = ["kdecode", "make-checkpoint", sys.argv[2], "--preset", "mini", *sys.argv[3:]]
while "ignore" in sys.argv:
    sys.argv.remove("ignore")
from kdecode.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("number", "code", "kind"),
    [
        (signal.SIGTERM, 143, []),
        (signal.SIGHUP, 129, []),
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, ["--draft", "inferact"]),
    ],
)
def test_a_signal_leaves_nothing_half_made(
    tmp_path: Path, number: int, code: int, kind: list[str]
) -> None:
    done = _python(_MAKES, int(number), tmp_path / "model", *kind)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    done = _python(_MAKES, int(signal.SIGHUP), tmp_path / "model", "ignore")
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_caller_has_its_handlers_back(capsys: pytest.CaptureFixture[str]) -> None:
    watched = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in watched]
    streams = sys.stdout, sys.stderr
    assert main(["sing"]) == 2
    assert [signal.getsignal(number) for number in watched] == before
    assert (sys.stdout, sys.stderr) == streams


# Interrupts itself when a module is looked for, and once more at the interpreter's exit.
_IMPORTS = """
import atexit, os, signal, sys
interrupted_at, sys.argv = sys.argv[1], ["kdecode", "plan", sys.argv[2]]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted_at:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from kdecode.cli import main
sys.modules.pop(interrupted_at, None)
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module", ["argparse", "kdecode.commands.common", "kdecode.commands.bench", "torch"]
)
def test_an_interrupt_is_quiet_during_imports_and_at_exit(
    module: str, mini_checkpoint: Path
) -> None:
    done = _python(_IMPORTS, module, mini_checkpoint)
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == ("", "\nkdecode: interrupted\n")


def test_what_is_imported_before_an_interrupt_is_caught() -> None:
    """An interrupt of these few is the interpreter's; so they are few."""
    script = (
        "import sys\nbefore = set(sys.modules)\nimport kdecode.cli\n"
        "print(*sorted(name for name in set(sys.modules) - before if 'kdecode' in name))"
    )
    done = _python(script)
    assert done.stdout.split() == [
        "kdecode",
        "kdecode.cli",
        "kdecode.commands",
        "kdecode.commands.process",
    ]


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["plan", "--help"],
        ["plan", "MODEL", *ENGINE],
        ["plan", "MODEL", "--json", *ENGINE],
        ["plan", "MODEL", "--device", "cuda", "--arch", "sm_80"],
        ["generate", "MODEL", "--prompt", "a", "--max-tokens", "2", *ENGINE],
        ["check", "MODEL", "--layers", "1", "--decode-backend", "auto", *ENGINE],
        ["make-checkpoint", "NEW", "--preset", "mini"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_output_that_cannot_be_written(
    command: list[str], mini_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"MODEL": str(mini_checkpoint), "NEW": str(tmp_path / "new")}
    args = [places.get(arg, arg) for arg in command]
    notes = tmp_path / "notes"
    with monkeypatch.context() as patch, notes.open("w") as stderr, open("/dev/full", "w") as out:
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", stderr)
        assert main(args) == 6
    last = notes.read_text().splitlines()[-1]
    assert last == (
        "kdecode: error: the output cannot be written: [Errno 28] No space left on device"
    )


_MAIN = "import sys\nfrom kdecode.cli import main\nsys.exit(main())"


@pytest.mark.parametrize(
    ("shell", "command", "code"),
    [
        (">&-", ["plan", "MODEL"], 6),
        (">&- 2>&-", ["--help"], 6),
        ("<&- >&- 2>&-", ["sing"], 2),
        ("2>&-", ["plan", "MODEL"], 0),
        ("2>/dev/full", ["plan", "MODEL"], 0),
        ("2>/dev/full", ["plan", "nosuch"], 2),
        ("2>&-", ["plan", "nosuch"], 2),
        (">/dev/full 2>/dev/full", ["--help"], 6),
        ("| true; exit ${PIPESTATUS[0]}", ["plan", "MODEL"], 6),
    ],
)
def test_streams_that_are_closed_or_full(
    shell: str, command: list[str], code: int, mini_checkpoint: Path
) -> None:
    args = [str(mini_checkpoint) if arg == "MODEL" else arg for arg in command]
    done = _python(_MAIN, *args, shell=shell)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_file_never_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom kdecode.commands.process import Streams\n"
        "with Streams():\n    file = open(sys.argv[1], 'w')\n    file.write(str(file.fileno()))\n"
    )
    done = _python(script, tmp_path / "file", shell="<&- >&- 2>&-")
    assert done.returncode == 0
    assert int((tmp_path / "file").read_text()) > 2
    assert os.path.getsize(tmp_path / "file") == 1
