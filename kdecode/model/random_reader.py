"""A checkpoint of any configuration that exists nowhere: tensors are made up when they are read.

For the speed of shapes whose weights are not at hand, whole or one rank's share of them; the
numbers of a step with such weights mean nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.model.rank_share import part_shape, share_of
from kdecode.model.roster import Slots, default_prefix, model_slots
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import ALONE, Ranks

# A made-up tensor is cut from so many numbers, and starts at a multiple of the other one. They have
# no small common period, so that neighbouring tensors differ.
_ALIGNMENT = 64
_POOL_SIZE = (1 << 24) + 3 * _ALIGNMENT
_WEIGHT_STD = 0.02
# Of MXFP4 scale bytes, around 2^-7: codes of up to 6 make weights of a few hundredths.
_SCALE_BYTES = (118, 122)


class RandomReader(CheckpointReader):
    """config: of the whole model; every tensor has the shape of this rank's part of it."""

    def __init__(self, config: ModelConfig, seed: int, ranks: Ranks = ALONE) -> None:
        self.whole, self.ranks = config, ranks
        self.config = share_of(config, ranks.size)
        self._prefix = default_prefix(config)
        self._model = model_slots(config, self._prefix)
        # No optional tensor is there.
        self._shard_of = {}
        generator = torch.Generator().manual_seed(seed)
        self._weights = torch.empty(_POOL_SIZE).normal_(0, _WEIGHT_STD, generator=generator)
        self._weights = self._weights.bfloat16()
        self._bytes = torch.randint(256, (_POOL_SIZE,), generator=generator, dtype=torch.uint8)
        self._at = 0

    def drop(self, layer: int) -> None:
        """Nothing is mapped."""

    def drop_outside(self) -> None:
        """Nothing is mapped."""

    def finish(self) -> None:
        """Nothing can be left over."""

    def _take(self, slots: Slots, slot: str) -> Tensor:
        spec = slots[slot]
        shape = (self.whole.kda.num_heads,) if slot == "attention.a_log" else spec.shape
        shape = part_shape(shape, slot, self.ranks.size)
        if spec.dtype == "U8":
            found = self._cut(self._bytes, shape)
            if spec.name.endswith("_scale"):
                low, high = _SCALE_BYTES
                found = low + found % (high - low + 1)
            return found
        weights = self._cut(self._weights, shape)
        # Norms are near 1, like A_log and the taps of a convolution.
        is_vector = len(shape) != 2
        if spec.dtype == "F32":
            weights = weights.float()
        return 1 + weights if is_vector else weights

    def _cut(self, pool: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The next numbers of a pool, which starts again where it ends."""
        size = math.prod(shape)
        pieces = []
        while size:
            piece = pool[self._at : self._at + size]
            pieces.append(piece)
            size -= len(piece)
            self._at = (self._at + len(piece)) % _POOL_SIZE
        self._at = -(-self._at // _ALIGNMENT) * _ALIGNMENT % _POOL_SIZE
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return flat.view(shape)
