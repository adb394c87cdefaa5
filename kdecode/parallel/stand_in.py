"""One rank without the others, for the time that its own part of a step takes.

Whoever it would wait for has come already. What the others would give is this rank's own, or zeros:
the values of such a step mean nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kdecode.parallel.ranks import Ranks

if TYPE_CHECKING:
    from kdecode.kernels.common.native import SharedExchange

# Of all ranks at all exchanges, counted in the first word of their memory: more than will be made.
_ARRIVALS = struct.pack("=I", 1 << 30)
_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class OwnParts:
    """An `Exchange` in which every rank gives what this one does, and none has to be waited for.

    It does less than a real one: of a sum nothing is added.
    """

    ranks: Ranks

    def reduce(self, part: Tensor) -> Tensor:
        return part.to(torch.bfloat16)

    def gather(self, part: Tensor) -> Tensor:
        return part.repeat(1, self.ranks.size)

    def swap(self, parts: Tensor) -> Tensor:
        return parts

    def rewind(self) -> None:
        """Nothing is on its way."""


def exchange_alone(ranks: Ranks, part_bytes: int) -> SharedExchange:
    """This rank's end of memory that the others never join, and do not have to.

    Their parts are zeros, which are read and added like any others. part_bytes: the most that a
    rank gives in one exchange.
    """
    from kdecode.parallel.shared import Segment, join

    segment = Segment(ranks.size, part_bytes)
    try:
        with open(segment.path, "r+b", buffering=0) as memory:
            memory.write(_ARRIVALS)
        return join(segment.path, segment.part_bytes, ranks, num_threads=1, timeout_s=_TIMEOUT_S)
    finally:
        segment.close()
