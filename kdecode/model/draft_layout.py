"""A draft's weights as torch multiplies them: matrices that read one input joined, vectors fp32.

Knows neither checkpoints nor what the weights are for beyond their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.config_draft import DraftConfig
from kdecode.kernels.common.matrix import Matrix, pack_rows
from kdecode.model.draft_parameters import DraftLayerParameters, DraftParameters, GqaParameters
from kdecode.model.parameters import MlaParameters


@dataclass(frozen=True)
class PackedDraftMla:
    cache_proj: Tensor  # [kv_rank + rope_dim, M]
    kv_norm: Tensor  # [kv_rank] fp32
    q_a: Tensor  # [q_rank, M]
    q_norm: Tensor  # [q_rank] fp32
    q_b: Tensor  # [H*qk_dim, q_rank]
    w_uk: Tensor  # [H, nope_dim, kv_rank]
    w_uv: Tensor  # [H, kv_rank, v_dim]
    o_proj: Tensor  # [M, H*v_dim]


@dataclass(frozen=True)
class PackedDraftGqa:
    cache_proj: Tensor  # [2*Hkv*K, M]: keys, then values
    k_norm: Tensor  # [K] fp32
    q_proj: Tensor  # [H*K, M]
    q_norm: Tensor  # [K] fp32
    o_proj: Tensor  # [M, H*K]


@dataclass(frozen=True)
class PackedDraftLayer:
    input_norm: Tensor  # [M] fp32
    post_norm: Tensor  # [M] fp32
    attention: PackedDraftMla | PackedDraftGqa
    gate_up: Tensor  # [2*width, M]
    down: Tensor  # [M, width]


class Confidence(NamedTuple):
    weight: Tensor  # [M + R] fp32
    bias: Tensor  # [1] fp32


@dataclass(frozen=True)
class PackedDraft:
    """embed and head: the draft's own, or None."""

    embed: Tensor | None  # [vocab, M]
    head: Matrix | None
    tap_norms: tuple[Tensor, ...] | None  # [M] fp32 each
    context_proj: Tensor  # [M, taps*M]
    context_norm: Tensor  # [M] fp32
    layers: tuple[PackedDraftLayer, ...]
    norm: Tensor  # [M] fp32
    markov_in: Tensor  # [vocab, R]
    markov_out: Tensor  # [vocab, R] fp32: its product is not rounded, which torch cannot do in bf16
    confidence: Confidence | None


def pack_draft(p: DraftParameters, config: DraftConfig, device: str) -> PackedDraft:
    """Copies a draft out of its mapped file, to a device."""
    pack = _Packer(config, device)
    confidence = None
    if p.confidence is not None:
        vectors = (p.confidence.weight, p.confidence.bias)
        confidence = Confidence(*map(pack.vector, vectors))
    return PackedDraft(
        embed=None if p.embed is None else pack.rows(p.embed),
        head=None if p.lm_head is None else pack.matrix(p.lm_head),
        tap_norms=None if p.tap_norms is None else tuple(map(pack.vector, p.tap_norms)),
        context_proj=pack.rows(p.context_proj),
        context_norm=pack.vector(p.context_norm),
        layers=tuple(map(pack.layer, p.layers)),
        norm=pack.vector(p.norm),
        markov_in=pack.rows(p.markov_in),
        markov_out=pack.vector(p.markov_out),
        confidence=confidence,
    )


@dataclass(frozen=True)
class _Packer:
    config: DraftConfig
    device: str

    def matrix(self, weight: Tensor) -> Matrix:
        rows, cols = weight.shape
        return Matrix("rows", rows, cols, self.rows(weight))

    def rows(self, *parts: Tensor) -> Tensor:
        return pack_rows(parts).data.to(self.device)

    def vector(self, x: Tensor) -> Tensor:
        return x.to(self.device, torch.float32)

    def layer(self, p: DraftLayerParameters) -> PackedDraftLayer:
        attention = p.attention
        return PackedDraftLayer(
            input_norm=self.vector(p.input_norm),
            post_norm=self.vector(p.post_norm),
            attention=(
                self._gqa(attention)
                if isinstance(attention, GqaParameters)
                else self._mla(attention)
            ),
            gate_up=self.rows(p.mlp.gate_proj, p.mlp.up_proj),
            down=self.rows(p.mlp.down_proj),
        )

    def _mla(self, p: MlaParameters) -> PackedDraftMla:
        mla = self.config.attention
        assert isinstance(mla, MlaConfig)
        if p.q_a_proj is None or p.q_a_norm is None or p.q_b_proj is None:
            raise ValueError("An MLA draft has a query of low rank; a part of it is absent.")
        per_head = p.kv_b_proj.view(mla.num_heads, -1, mla.kv_rank)
        w_uk, w_uv = torch.split(per_head, [mla.nope_dim, mla.v_dim], dim=1)
        return PackedDraftMla(
            cache_proj=self.rows(p.kv_a_proj),
            kv_norm=self.vector(p.kv_a_norm),
            q_a=self.rows(p.q_a_proj),
            q_norm=self.vector(p.q_a_norm),
            q_b=self.rows(p.q_b_proj),
            w_uk=w_uk.contiguous().to(self.device),
            w_uv=w_uv.transpose(1, 2).contiguous().to(self.device),
            o_proj=self.rows(p.o_proj),
        )

    def _gqa(self, p: GqaParameters) -> PackedDraftGqa:
        return PackedDraftGqa(
            cache_proj=self.rows(p.k_proj, p.v_proj),
            k_norm=self.vector(p.k_norm),
            q_proj=self.rows(p.q_proj),
            q_norm=self.vector(p.q_norm),
            o_proj=self.rows(p.o_proj),
        )
