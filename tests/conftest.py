"""What every test shares: one torch thread, and the two smallest models as checkpoints on disk.

Without a GPU Triton kernels run in Triton's interpreter, which has to be chosen before Triton is
imported, and which is made to round as a GPU does.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_interpreter import round_in_the_interpreter

from kdecode.model.synthesis import make_checkpoint

_WITHOUT_GPU = pytest.StashKey[int]()

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        round_in_the_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-plans",
        action="store_true",
        help="write the snapshots in tests/plans instead of comparing with them",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs more GPUs than there are is not run, and the summary says how much that is.

    Nor is what stands for a GPU's own test where there is one: its kernels would run there.
    """
    found = _num_gpus()
    left_out = {item for item in items if _gpus_of(item) > found}
    stand_ins = {item for item in items if found and item.get_closest_marker("interpreter")}
    unwanted = left_out | stand_ins
    config.hook.pytest_deselected(items=[*unwanted])
    config.stash[_WITHOUT_GPU] = len(left_out)
    items[:] = [item for item in items if item not in unwanted]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """pytest-xdist's: tests are left out in its workers, and told where their results are."""
    count = node.workeroutput.get("without_gpu", 0) if hasattr(node, "workeroutput") else 0
    node.config.stash[_WITHOUT_GPU] = count


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["without_gpu"] = session.config.stash.get(_WITHOUT_GPU, 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash.get(_WITHOUT_GPU, 0)
    if count:
        terminalreporter.write_line(
            f"{count} tests were not run: they need more GPUs than there are here ({_num_gpus()})."
        )


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpus_of(item: pytest.Item) -> int:
    """How many a test needs: its marker's number, which is 1 where it has none."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return 0
    (count,) = marker.args or (1,)
    return int(count)


def _made(tmp_path_factory: pytest.TempPathFactory, preset: str) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / preset
    make_checkpoint(directory, preset, seed=0)
    return directory


@pytest.fixture(scope="session")
def mini_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A K3 checkpoint with every mechanism of the release, of a few MB. Read only."""
    return _made(tmp_path_factory, "mini")


@pytest.fixture(scope="session")
def mini_linear_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-Linear checkpoint of a few MB. Read only."""
    return _made(tmp_path_factory, "kimi-linear-mini")


@pytest.fixture(scope="session")
def mini_16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A K3 checkpoint that up to 16 ranks can share. Read only."""
    return _made(tmp_path_factory, "mini-16")


@pytest.fixture(scope="session")
def mini_linear_16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-Linear checkpoint that up to 16 ranks can share. Read only."""
    return _made(tmp_path_factory, "kimi-linear-mini-16")
