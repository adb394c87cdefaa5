"""The model that is used when none is named: where it is kept, and which version of it.

Owns the folder's name. It has a digest of everything that decides the model's bytes, so that a
folder that an earlier version of the synthesis left behind is never taken for this version's.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kdecode.config import environment
from kdecode.config_checkpoint import CONFIG_FILE
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.synthesis import SYNTHESIS_DIGEST, Progress, make_checkpoint

DEFAULT_PRESET = "small"
DEFAULT_SEED = 0


def default_model_directory(progress: Progress | None = None) -> Path:
    """The default model's directory; made on first use.

    Of several processes that make it at once, one wins and the others use its result. Raises
    OSError where it cannot be written.
    """
    directory = environment().cache_dir / _folder_name()
    if (directory / CONFIG_FILE).exists():
        return directory
    try:
        make_checkpoint(directory, DEFAULT_PRESET, DEFAULT_SEED, progress)
    except OSError:
        # Another process was faster; anything else in the way is an error.
        if not (directory / CONFIG_FILE).exists():
            raise
    return directory


def _folder_name() -> str:
    # `SYNTHESIS_DIGEST` stands for the distributions, the configuration for the sizes.
    decides = json.dumps([SYNTHESIS_DIGEST, released_config(PRESETS[DEFAULT_PRESET])])
    version = hashlib.sha256(decides.encode()).hexdigest()[:12]
    return f"{DEFAULT_PRESET}-{DEFAULT_SEED}-{version}"
