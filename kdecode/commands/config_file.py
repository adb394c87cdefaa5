"""`--config file.yaml`: a command's flags in a file, as vLLM takes them.

Owns how a YAML document becomes arguments. They are put before those of the command line, so that
argparse checks both in the same way and the command line wins. Does not know what flags there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdecode.commands.common import InputError

FLAG = "--config"
# Flags that are on unless `--no-...` turns them off; any other one is off where it is absent.
ON_BY_DEFAULT = frozenset({"--enable-prefix-caching"})


def expand(command: str, argv: Sequence[str]) -> list[str]:
    """Arguments with those of the file behind the command's name. Raises InputError."""
    path = config_path(argv)
    if path is None or command not in argv:
        return list(argv)
    place = list(argv).index(command) + 1
    return [*argv[:place], *arguments(read(path)), *argv[place:]]


def config_path(argv: Sequence[str]) -> str | None:
    """The last file that is named; None without one."""
    found = None
    for place, argument in enumerate(argv):
        if argument.startswith(f"{FLAG}="):
            found = argument.partition("=")[2]
        elif argument == FLAG and place + 1 < len(argv):
            found = argv[place + 1]
    return found


def read(path: str) -> dict[str, Any]:
    """A file's settings by the names of flags, without dashes in front. Raises InputError."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InputError(f"{FLAG} needs the package pyyaml, which is not installed.") from error
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"the configuration file {path} cannot be read: {error}") from error
    settings = {} if document is None else document
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise InputError(f"the configuration file {path} is not a list of `name: value`.")
    if FLAG[2:] in settings:
        raise InputError(f"the configuration file {path} names another one.")
    return settings


def arguments(settings: dict[str, Any]) -> list[str]:
    """Settings as arguments; `model`, which has no flag, is not among them."""
    found: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False and flag in ON_BY_DEFAULT:
            found.append(f"--no-{flag[2:]}")
        if name == "model" or value is None or value is False:
            continue
        if value is True:
            found.append(flag)
        elif isinstance(value, list):
            found += [flag, *map(str, value)]
        else:
            # One argument, so that a value may begin with a dash.
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            found.append(f"{flag}={text}")
    return found
