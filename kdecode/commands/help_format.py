"""How the command line's help says defaults."""

from __future__ import annotations

import argparse
import copy
from typing import Any


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says each default that is a value once, also of options that say nothing else."""

    def _format_action(self, action: argparse.Action) -> str:
        if action.option_strings and action.help is None and not _is_nothing(action.default):
            action = copy.copy(action)
            action.help = "(default: %(default)s)"
        return super()._format_action(action)

    def _expand_help(self, action: argparse.Action) -> str:
        if isinstance(action.default, list | tuple):
            action = copy.copy(action)
            action.default = " ".join(map(str, action.default))
        return super()._expand_help(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if _is_nothing(action.default) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def _is_nothing(default: Any) -> bool:
    return default is None or default is False or default in ("", [], (), {})
