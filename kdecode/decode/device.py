"""What the decode paths ask of a device: its architecture, to be the current one, to be done.

Owns the only calls of `torch.cuda` beside graphs, streams and staging. Nothing here needs a GPU to
be imported, and for the CPU nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from kdecode.decode.latency_cuda import OLDEST_ARCH


def device_arch(device: str) -> str:
    """ "sm_90" of a CUDA device, "" of the CPU.

    Where torch does not find it, as when a plan is described on another machine, it is the oldest
    one that plans are made for; that there is no such device is `engine/preflight.py`'s to say.
    """
    if device == "cpu":
        return ""
    index = torch.device(device).index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return f"sm_{OLDEST_ARCH}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def has_triton(device: str) -> bool:
    """Whether Triton's kernels can run on the device, here and now."""
    return is_for_triton(device) and torch.cuda.is_available()


def is_for_triton(device: str) -> bool:
    """Whether they can be made for such a device, which need not be here."""
    return device != "cpu" and find_spec("triton") is not None


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Makes a CUDA device the current one: kernels that are not torch's own run there."""
    if device == "cpu":
        yield
        return
    with torch.cuda.device(device):
        yield


def wait_for(device: str) -> None:
    """Returns when the device has done all that it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def adopt_device(device: str) -> None:
    """Makes a CUDA device the current one of this process, for a process that has no other."""
    if device != "cpu":
        torch.cuda.set_device(device)
