"""Inputs of a static plan on a device: one block there, one on the host, one copy between them.

Owns both blocks and who may write the host's: the copy runs behind the host, so `arrays` waits for
the one before. Does not know what the inputs mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kdecode.decode.plan import Buffer
from kdecode.kernels.contract import Buffers, PlanMemory

# Numbers of 4 bytes; so every input begins at a multiple of 64 bytes, whatever the number of rows.
_ALIGNMENT = 16
# What an input may be of, and what the host has it as.
_HOST_TYPES: Mapping[torch.dtype, type[Any]] = {torch.int32: np.int32, torch.float32: np.float32}


class Staging:
    """tensors: of the device, by name, where a plan's steps read them; int32 or fp32."""

    def __init__(self, specs: tuple[Buffer, ...], memory: PlanMemory, name: str) -> None:
        shapes = {spec.name: tuple(int(size) for size in spec.shape) for spec in specs}
        begins, total = {}, 0
        for key, shape in shapes.items():
            begins[key] = total
            total += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self._device = memory.take(name, (total,), torch.int32)
        is_cuda = self._device.is_cuda
        # Pinned: only from there does a copy not wait for the device.
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=is_cuda)
        self._copied: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        whole: NDArray[np.int32] = self._host.numpy()
        self.tensors: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        for spec in specs:
            key, shape = spec.name, shapes[spec.name]
            part = slice(begins[key], begins[key] + math.prod(shape))
            self.tensors[key] = self._device[part].view(spec.dtype).view(shape)
            self._arrays[key] = whole[part].view(_HOST_TYPES[spec.dtype]).reshape(shape)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The host's side, to be written; `send` takes it over."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._arrays

    def send(self) -> None:
        """Steps that are launched after this find what was written."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def stage_inputs(
    specs: tuple[Buffer, ...], memory: PlanMemory | None, name: str = "row_inputs"
) -> Buffers:
    """The buffers of a static plan whose inputs are staged."""
    buffers = Buffers(memory=memory)
    inputs = tuple(spec for spec in specs if spec.lifetime == "input")
    buffers.staging = Staging(inputs, buffers.memory, name)
    for spec in specs:
        if spec.lifetime == "input":
            buffers[spec.name] = buffers.staging.tensors[spec.name]
            continue
        shape = [int(size) for size in spec.shape]
        buffers[spec.name] = buffers.memory.take(spec.name, shape, spec.dtype)
    return buffers
