"""Cache rows of a draft in torch, for any number of tokens: products of the device's own library.

For every token of a draft that runs in torch, and for the prompts of one that has plans, whose
passes of few rows would read its weights again and again. Owns the weights of it, whichever layout
they were packed in. The maths and the rounding points are `model/draft_reference.py`'s. Does not
know requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config import MlaConfig
from kdecode.config_draft import DraftConfig
from kdecode.kernels.common.norm import rms_norm
from kdecode.model.draft_layout import PackedDraft, PackedDraftMla
from kdecode.model.draft_reference import frequencies
from kdecode.model.draft_tiles import DraftPlanWeights
from kdecode.model.layout import PackedGqa, PackedMla

# Cosines and sines, [T, dim / 2] fp32.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RowWeights:
    """What makes a layer's cache rows. proj [width, M]: latent and rotated part, or the keys and
    then the values of all heads. norm fp32: of the latent, or of every key."""

    proj: Tensor
    norm: Tensor


@dataclass(frozen=True)
class ContextWeights:
    """tap_norms: [M] fp32 each, None without; proj [M, taps*M]; norm [M] fp32."""

    tap_norms: tuple[Tensor, ...] | None
    proj: Tensor
    norm: Tensor
    layers: tuple[RowWeights, ...]

    @staticmethod
    def of_torch(packed: PackedDraft) -> ContextWeights:
        layers = []
        for layer in packed.layers:
            p = layer.attention
            norm = p.kv_norm if isinstance(p, PackedDraftMla) else p.k_norm
            layers.append(RowWeights(p.cache_proj, norm))
        return ContextWeights(
            packed.tap_norms, packed.context_proj, packed.context_norm, tuple(layers)
        )

    @staticmethod
    def of_plan(weights: DraftPlanWeights) -> ContextWeights:
        """Of weights in "rows", where they are."""
        layers = []
        for layer in weights.layers:
            p = layer.attention
            assert isinstance(p, PackedMla | PackedGqa)
            norm = p.kv_norm if isinstance(p, PackedMla) else p.k_norm
            attention = weights.config.gqa or weights.config.mla
            # The queries' rows come first.
            layers.append(RowWeights(p.in_proj.data[-attention.cache_width :], norm))
        norms = weights.tap_norms
        return ContextWeights(
            None if norms is None else tuple(norms),
            weights.context_proj.data,
            weights.context_norm,
            tuple(layers),
        )


class DraftRows:
    """Makes cache rows and writes them. device: of the weights and of the caches."""

    def __init__(
        self, config: DraftConfig, weights: ContextWeights, caches: Caches, device: str
    ) -> None:
        """caches: of the engine."""
        self._config = config
        self._weights = weights
        self._caches = caches
        self._device = device
        self._frequencies = frequencies(config.rope)

    def append(self, taps: Tensor, positions: Tensor, places: Tensor) -> None:
        """Caches the rows of committed tokens, in every layer.

        taps [T, taps, M]; positions, places [T] int64, on the host: of the tokens, and of their
        rows among those of all pages.
        """
        with torch.no_grad():
            context, angles = self._context(taps), self.angles(positions)
            index = places.to(self._device)
            for number in range(len(self._weights.layers)):
                rows = self.rows(number, context, angles)
                self._caches.draft[number].flatten(0, 1).index_copy_(0, index, rows)

    def rows(self, number: int, x: Tensor, angles: Angles) -> Tensor:
        """The cache row of each row of x [T, M], which is context, or the block after its norm."""
        p, attention = self._weights.layers[number], self._config.attention
        both = F.linear(x, p.proj)
        if isinstance(attention, MlaConfig):
            latent, key = torch.split(both, [attention.kv_rank, attention.rope_dim], dim=-1)
            turned = self.rotate(key.unsqueeze(1), angles).squeeze(1)
            return torch.cat([rms_norm(latent, p.norm, attention.latent_norm_eps), turned], -1)
        key, value = both.chunk(2, dim=-1)
        key = key.view(-1, attention.num_kv_heads, attention.head_dim)
        key = self.rotate(rms_norm(key, p.norm, self._config.rms_eps), angles)
        return torch.cat([key.flatten(1), value], dim=-1)

    def angles(self, positions: Tensor) -> Angles:
        """How tokens turn that are at these positions, [T] on the host."""
        angles = positions.double().unsqueeze(-1) * self._frequencies
        amplitude = self._config.rope.amplitude
        cos, sin = (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()
        return cos.to(self._device), sin.to(self._device)

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """x [T, H, dim] bf16, turned by position, rounded once."""
        cos, sin = (part.unsqueeze(1) for part in angles)
        wide = x.float()
        if self._config.rope.is_interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = wide.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return turned.to(x.dtype)

    def _context(self, taps: Tensor) -> Tensor:
        weights, eps = self._weights, self._config.rms_eps
        if weights.tap_norms is not None:
            normed = [
                rms_norm(taps[:, place], norm, eps) for place, norm in enumerate(weights.tap_norms)
            ]
            taps = torch.stack(normed, dim=1)
        return rms_norm(F.linear(taps.flatten(1), weights.proj), weights.norm, eps)


def token_positions(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Positions [T] of (first, number) spans, on the host."""
    return torch.cat([torch.arange(first, first + count) for first, count in spans])
