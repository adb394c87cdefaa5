"""The model that is used when none is named: where it is kept, which version of it, and its repair.

Owns the folder's name. It has a digest of everything that decides the model's bytes, so that a
folder that an earlier version of the synthesis left behind is never taken for this version's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from kdecode.config import environment
from kdecode.model.building import remove_abandoned, scratch
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.synthesis import SYNTHESIS_DIGEST, Progress, is_intact, make_checkpoint

DEFAULT_PRESET = "small"
DEFAULT_SEED = 0

log = logging.getLogger(__name__)


def default_model_directory(progress: Progress | None = None) -> Path:
    """The default model's directory; made on first use, and anew where it is damaged.

    Of several processes that make it at once, one wins and the others use its result. Raises
    OSError where it cannot be written.
    """
    directory = environment().cache_dir / _folder_name()
    remove_abandoned(directory.parent)
    if _is_intact(directory):
        return directory
    if os.path.lexists(directory):
        log.warning("the default model in %s is damaged; it is made anew", directory)
        # Aside in one go, so that no other process ever sees half of it.
        with scratch(directory) as aside, suppress(FileNotFoundError):
            # Looked at again, because another process may have been here.
            if not _is_intact(directory):
                directory.rename(aside / "damaged")
    try:
        make_checkpoint(directory, DEFAULT_PRESET, DEFAULT_SEED, progress)
    except OSError:
        # Another process was faster; anything else in the way is an error.
        if not _is_intact(directory):
            raise
    return directory


def _is_intact(directory: Path) -> bool:
    return is_intact(directory, DEFAULT_PRESET, DEFAULT_SEED)


def _folder_name() -> str:
    # `SYNTHESIS_DIGEST` stands for the distributions, the configuration for the sizes.
    decides = json.dumps([SYNTHESIS_DIGEST, released_config(PRESETS[DEFAULT_PRESET])])
    version = hashlib.sha256(decides.encode()).hexdigest()[:12]
    return f"{DEFAULT_PRESET}-{DEFAULT_SEED}-{version}"
