"""One rank's share of a model under tensor parallelism, as a smaller model, with random weights.

Owns which sizes are divided and which are whole on every rank, and a reader that makes up the
tensors instead of reading them. What runs is the real arithmetic of one rank without its exchanges
with the others: for speeds, its numbers mean nothing.

Divided: heads, MLP widths (a rank has a slice of every expert), the vocabulary. Whole: the router,
both latent projections, the projections into the latent spaces of MLA, and the rank of a gate.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP, ConfigError, ModelConfig
from kdecode.model.presets import RELEASES, released_config
from kdecode.model.roster import TensorSpec, default_prefix, model_slots
from kdecode.model.weights import CheckpointReader

# A made-up tensor is cut from so many numbers, and starts at a multiple of the other one. They have
# no small common period, so that neighbouring tensors differ.
_ALIGNMENT = 64
_POOL_SIZE = (1 << 24) + 3 * _ALIGNMENT
_WEIGHT_STD = 0.02
# Of MXFP4 scale bytes, around 2^-7: codes of up to 6 make weights of a few hundredths.
_SCALE_BYTES = (118, 122)


def share_of_release(name: str, num_layers: int, size: int, rank: int) -> ModelConfig:
    """The first ``num_layers`` layers of a release, of them what one rank of ``size`` has.

    Every rank's share has the same shapes. Raises ConfigError for what cannot be divided.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank is {rank}; with {size} ranks it must be from 0 to {size - 1}.")
    config = ModelConfig.from_checkpoint(released_config(RELEASES[name]))
    # Both kinds of attention, so that there is a cache of each kind.
    fewest = config.layer_kinds.index("mla") + 1
    if not fewest <= num_layers <= config.num_layers:
        raise ConfigError(
            f"{num_layers} layers of {name}; it must be from {fewest} to {config.num_layers}."
        )
    return replace(
        share_of(config, size),
        layer_kinds=config.layer_kinds[:num_layers],
        mlp_kinds=config.mlp_kinds[:num_layers],
    )


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """What one rank of ``size`` has of a model. Raises ConfigError for what cannot be divided."""
    moe = config.moe
    group = MXFP4_GROUP if moe.expert_format == "mxfp4" else 1
    divided = {
        "KDA heads": (config.kda.num_heads, 1),
        "MLA heads": (config.mla.num_heads, 1),
        "columns of an expert": (moe.expert_width, group),
        "columns of a dense MLP": (config.dense_width, 1),
        "tokens of the vocabulary": (config.vocab_size, 1),
    }
    for what, (total, unit) in divided.items():
        if total % (size * unit):
            groups = f" in groups of {unit}" if unit > 1 else ""
            raise ConfigError(f"{total} {what} cannot be divided among {size} ranks{groups}.")
    return replace(
        config,
        vocab_size=config.vocab_size // size,
        dense_width=config.dense_width // size,
        kda=replace(config.kda, num_heads=config.kda.num_heads // size),
        mla=replace(config.mla, num_heads=config.mla.num_heads // size),
        moe=replace(moe, expert_width=moe.expert_width // size),
    )


def exchanged_buffers(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Values of a layer of which each rank has a part of the sum: one exchange each.

    Where experts work at the model's width, theirs and the shared experts' sum are one.
    """
    if config.mlp_kinds[layer] == "dense":
        return "attn_delta", "mlp_delta"
    if config.moe.latent_width is None:
        return "attn_delta", "mlp_delta"
    return ("attn_delta", "expert_sum", *(("shared",) if config.moe.num_shared else ()))


class RandomReader(CheckpointReader):
    """A checkpoint of any configuration that exists nowhere: a tensor is made when it is read."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
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

    def _take(self, spec: TensorSpec) -> Tensor:
        if spec.dtype == "U8":
            found = self._cut(self._bytes, spec)
            if spec.name.endswith("_scale"):
                low, high = _SCALE_BYTES
                found = low + found % (high - low + 1)
            return found
        weights = self._cut(self._weights, spec)
        # Norms are near 1, like A_log and the taps of a convolution.
        is_vector = len(spec.shape) != 2
        if spec.dtype == "F32":
            weights = weights.float()
        return 1 + weights if is_vector else weights

    def _cut(self, pool: Tensor, spec: TensorSpec) -> Tensor:
        """The next numbers of a pool, which starts again where it ends."""
        size = math.prod(spec.shape)
        pieces = []
        while size:
            piece = pool[self._at : self._at + size]
            pieces.append(piece)
            size -= len(piece)
            self._at = (self._at + len(piece)) % _POOL_SIZE
        self._at = -(-self._at // _ALIGNMENT) * _ALIGNMENT % _POOL_SIZE
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return flat.view(spec.shape)
