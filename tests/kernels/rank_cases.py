"""One rank of several in the kernels' tests: its buffers, and blocks that all ranks have given.

A case's configuration is taken for one rank's share. The blocks of all ranks lie in this process.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton_cases import DEVICE, Case

from kdecode.cache.caches import Caches
from kdecode.decode.buffers import device_buffers, input_buffers, value_buffers
from kdecode.decode.latency_cuda_ranks import more_buffers
from kdecode.decode.staging import stage_inputs
from kdecode.kernels.common.rank_parts import offsets, parts_of
from kdecode.kernels.contract import Buffers, DeviceExchange, PartBlock, PlanMemory, Problem
from kdecode.parallel.ranks import Ranks
from kdecode.testing.poison import poison_


class OneOfSeveral:
    """A rank of ``size``. parts: by buffer, what each rank has given of it; of an exchange, whose
    other blocks are elsewhere, only its own."""

    def __init__(
        self,
        case: Case,
        size: int,
        rows: int,
        rank: int = 0,
        exchange: DeviceExchange | None = None,
    ) -> None:
        config, ranks = case.config, Ranks(rank, size)
        self.case, self.ranks, self.rows = case, ranks, rows
        specs = (
            *input_buffers(rows, 1),
            *value_buffers(config, rows, ranks),
            *device_buffers(config, rows),
            *more_buffers(config, rows, ranks),
        )
        self.buffers: Buffers = stage_inputs(specs, PlanMemory(DEVICE))
        self.buffers.caches = Caches.allocate(config, DEVICE, 1, 1, 8)
        self.parts: dict[str, list[Tensor]] = {}
        blocks = {}
        for place, parts in parts_of(config, size).items():
            begins, total = offsets(parts, rows)
            if exchange is None:
                blocks[place], given = _given(size, total)
            else:
                blocks[place] = exchange.block(place, total)
                given = [blocks[place].part]
            for part in parts:
                begin, shape = begins[part.buffer], (rows, part.width)
                end = begin + rows * part.width * part.dtype.itemsize
                views = [block[begin:end].view(part.dtype).view(shape) for block in given]
                self.parts[part.buffer] = views
                self.buffers[part.buffer] = views[0]
        self.buffers.blocks = blocks

    def problem(self, layer: int | None) -> Problem:
        return replace(self.case.problem(layer, self.rows), ranks=self.ranks)

    def poison(self) -> None:
        """Every buffer, and what the other ranks have given."""
        given = [part for parts in self.parts.values() for part in parts]
        for tensor in (*self.buffers.values(), *given):
            poison_(tensor)

    def give(self, name: str, seed: int) -> list[Tensor]:
        """Every rank's part of this name, seeded; copies on the host."""
        generator = torch.Generator().manual_seed(seed)
        for part in self.parts[name]:
            part.copy_(torch.randn(part.shape, generator=generator))
        return [part.cpu() for part in self.parts[name]]

    def fill(self, name: str, seed: int, count: int | None = None) -> Tensor:
        """A buffer, or the first ``count`` of its entries, seeded; a copy on the host."""
        tensor = self.buffers[name][:count]
        generator = torch.Generator().manual_seed(seed)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return tensor.to("cpu", copy=True)


def sum_of(parts: list[Tensor]) -> Tensor:
    """In the order of the ranks, rounded once."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(torch.bfloat16)


def _given(size: int, num_bytes: int) -> tuple[PartBlock, list[Tensor]]:
    """The first rank's block, and those of all."""
    given = torch.full((size, num_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    places = [block.data_ptr() for block in given]
    sources = torch.tensor(places, dtype=torch.int64, device=DEVICE)
    return PartBlock(given[0], sources, lambda: None), list(given)
