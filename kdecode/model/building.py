"""Folders that appear whole or not at all, whatever happens to the process that makes them.

Owns the folder in which one is built, beside its final place, and the removal of those whose maker
is gone. A maker holds a lock on its folder for as long as it lives, and the system gives it back
even after SIGKILL; so a folder without a holder is nobody's. Knows nothing of what is built.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_INFIX = ".partial-"


@contextmanager
def building(directory: str | Path) -> Iterator[Path]:
    """An empty folder that becomes ``directory`` at the end of the block, and nothing on an error.

    What earlier makers of this target left behind is removed. Raises FileExistsError for a target
    that is more than an empty folder, and OSError where it has become another one's meanwhile.
    """
    # Absolute, because "." can neither be named beside itself nor be replaced.
    target = Path(os.path.abspath(directory))
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is no empty directory.")
    if target == Path.cwd():
        raise FileExistsError(f"{target} is the current directory; name a new one in it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent, target.name)
    with scratch(target) as around:
        made = around / "made"
        made.mkdir()
        yield made
        made.rename(target)


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A locked folder beside ``target``, removed at the end with all that is in it."""
    folder, lock = _locked_folder(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path, name: str = "*") -> None:
    """Removes the folders that makers of this target, or of any, were building when they died.

    As far as it may: what cannot be looked at or removed stays.
    """
    with suppress(OSError):
        for folder in list(parent.iterdir()):
            target, infix, _ = folder.name.rpartition(_INFIX)
            if not infix or name not in ("*", target) or folder.is_symlink():
                continue
            lock = _try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked_folder(target: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=target.name + _INFIX, dir=target.parent))
        lock = _try_lock(folder)
        # Between the two lines somebody may have taken it for an abandoned one.
        if lock is not None:
            return folder, lock


def _try_lock(folder: Path) -> int | None:
    """The lock on a folder; None where another process has it, or has removed the folder."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
