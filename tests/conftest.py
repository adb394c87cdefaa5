"""What every test shares: one torch thread, and the two smallest models as checkpoints on disk.

Without a GPU Triton kernels run in Triton's interpreter, which has to be chosen before Triton is
imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kdecode.model.synthesis import make_checkpoint

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-plans",
        action="store_true",
        help="write the snapshots in tests/plans instead of comparing with them",
    )


@pytest.fixture(scope="session")
def mini_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A K3 checkpoint with every mechanism of the release, of a few MB. Read only."""
    directory = tmp_path_factory.mktemp("checkpoints") / "mini"
    make_checkpoint(directory, "mini", seed=0)
    return directory


@pytest.fixture(scope="session")
def mini_linear_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-Linear checkpoint of a few MB. Read only."""
    directory = tmp_path_factory.mktemp("checkpoints") / "kimi-linear-mini"
    make_checkpoint(directory, "kimi-linear-mini", seed=0)
    return directory
