"""The model and the draft that come with the package, and are used when none is named.

Owns where they are and whether they are whole. How they were trained is in ``MODEL_CARD.md`` beside
them.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from kdecode.model.shards import CheckpointError

SHIPPED = Path(__file__).parents[1] / "shipped"
DEFAULT_MODEL, DEFAULT_DRAFT = "k3-tiny", "k3-tiny-draft"
SUMS_FILE = "SHA256SUMS"


def default_model_directory() -> Path:
    """The default model's checkpoint. CheckpointError for a file that is not what was shipped."""
    return _checked(SHIPPED, DEFAULT_MODEL)


def default_draft_directory() -> Path:
    """The checkpoint of the default model's draft. CheckpointError as above."""
    return _checked(SHIPPED, DEFAULT_DRAFT)


@cache
def _checked(shipped: Path, name: str) -> Path:
    """The folder, once every file of it has the sum that `SUMS_FILE` says."""
    for file, wanted in read_sums(shipped).items():
        if not file.startswith(f"{name}/"):
            continue
        try:
            found = hashlib.sha256((shipped / file).read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(
                f"{shipped / file} of the default model cannot be read ({error.strerror}); install "
                "kdecode anew, or name a MODEL."
            ) from error
        if found != wanted:
            raise CheckpointError(
                f"{shipped / file} of the default model has the SHA-256 {found[:16]}..., not "
                f"{wanted[:16]}...; install kdecode anew, or name a MODEL."
            )
    return shipped / name


def read_sums(shipped: Path) -> dict[str, str]:
    """SHA-256 by file, from lines as the program sha256sum writes them."""
    try:
        lines = (shipped / SUMS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CheckpointError(
            f"{shipped / SUMS_FILE} of the default model cannot be read ({error.strerror}); "
            "install kdecode anew, or name a MODEL."
        ) from error
    return {file: digest for digest, file in (line.split("  ", 1) for line in lines)}
