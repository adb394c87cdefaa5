"""One server for the whole folder; after every test it holds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_model import Served, serve


@pytest.fixture(scope="session")
def served(mini_checkpoint: Path) -> Iterator[Served]:
    with serve(mini_checkpoint) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        request.getfixturevalue("served").wait_until_idle()
