"""Both small checkpoints, packed for the native kernels, by every module that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_cases import Loaded

from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader


@pytest.fixture(scope="session", params=["mini_checkpoint", "mini_linear_checkpoint"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    directory: Path = request.getfixturevalue(request.param)
    packed = pack_model(CheckpointReader(directory), "tiles")
    return Loaded(packed, CheckpointReader(directory).load_model())
