"""A packed model without data: what a configuration would be packed into, on torch's meta device.

Owns the shapes only; `layout.py` owns the layout, and a test holds the two together. For plans and
sizes of models whose weights are not at hand: nothing is allocated, whatever the size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP, ModelConfig
from kdecode.kernels.common.matrix import (
    GROUP_BYTES,
    INTEGER_BITS,
    TILE_ROWS,
    Matrix,
    MatrixFormat,
    num_tiles,
)
from kdecode.model.gated_layout import Mxfp4Format
from kdecode.model.layout import (
    PackedGqa,
    PackedKda,
    PackedLayer,
    PackedMla,
    PackedMlp,
    PackedModel,
    PackedMoe,
    TrunkFormat,
    partial_format,
)
from kdecode.parallel.ranks import ALONE, Ranks


def outline_model(
    config: ModelConfig,
    trunk_format: TrunkFormat,
    mxfp4: Mxfp4Format = "mxfp4_tiles",
    ranks: Ranks = ALONE,
) -> PackedModel:
    """`layout.pack_model` of any checkpoint of this configuration, but for the data.

    The experts of a layer are one object, repeated. A checkpoint's own cache scales are not known.
    ranks: of several, ``config`` is a rank's share.
    """
    device = "cpu" if mxfp4 == "mxfp4_tiles" else "cuda"
    partial = partial_format(trunk_format, device, ranks)
    outline = _Outline(config, trunk_format, mxfp4, ranks, partial)
    width = config.hidden_size
    return PackedModel(
        config=config,
        embed=_empty((config.vocab_size, width), torch.bfloat16),
        layers=tuple(outline.layer(number) for number in range(config.num_layers)),
        final_mix=outline.mix(),
        norm=_vector(width),
        head=outline.matrix(config.vocab_size, width),
    )


def outline_bytes(value: Any) -> int:
    """Memory that an outline, or a part of one, would take with its data."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(outline_bytes(item) for item in value)
    if is_dataclass(value) and not isinstance(value, ModelConfig):
        return sum(outline_bytes(getattr(value, field.name)) for field in fields(value))
    return 0


@dataclass(frozen=True)
class _Outline:
    config: ModelConfig
    trunk_format: TrunkFormat
    mxfp4: Mxfp4Format
    ranks: Ranks
    partial: TrunkFormat

    def layer(self, number: int) -> PackedLayer:
        config, width = self.config, self.config.hidden_size
        is_dense = config.mlp_kinds[number] == "dense"
        return PackedLayer(
            input_norm=_vector(width),
            post_norm=_vector(width),
            attn_mix=self.mix(),
            mlp_mix=self.mix(),
            attention=self._attention(number),
            mlp=self._gated(config.dense_width, width) if is_dense else self._moe(),
        )

    def mix(self) -> Tensor | None:
        return None if self.config.attn_res_block is None else _vector(self.config.hidden_size)

    def matrix(self, rows: int, cols: int) -> Matrix:
        if self.trunk_format == "rows":
            return Matrix("rows", rows, cols, _empty((rows, cols), torch.bfloat16))
        if self.trunk_format in INTEGER_BITS and cols % MXFP4_GROUP == 0:
            return _integers(self.trunk_format, rows, cols)
        return self.tiles(rows, cols)

    def tiles(self, rows: int, cols: int) -> Matrix:
        shape = (num_tiles(rows), cols // 2, TILE_ROWS, 2)
        return Matrix("tiles", rows, cols, _empty(shape, torch.bfloat16))

    def summed(self, rows: int, cols: int) -> Matrix:
        """A matrix whose products are parts of a sum."""
        return replace(self, trunk_format=self.partial).matrix(rows, cols)

    def gathered(self, rows: int, cols: int) -> Matrix:
        """A matrix of which a rank has some rows, where the configuration has all of them."""
        return self.matrix(self.ranks.part(rows), cols)

    def router(self, rows: int, cols: int) -> Matrix:
        rows = self.ranks.part(rows)
        return self.matrix(rows, cols) if self.trunk_format == "rows" else self.tiles(rows, cols)

    def _attention(self, number: int) -> PackedKda | PackedMla | PackedGqa:
        kind = self.config.layer_kinds[number]
        if kind == "gqa":
            return self._gqa()
        return self._kda() if kind == "kda" else self._mla()

    def _gqa(self) -> PackedGqa:
        gqa, width = self.config.gqa, self.config.hidden_size
        assert gqa is not None
        queries = gqa.num_heads * gqa.head_dim
        return PackedGqa(
            in_proj=self.matrix(queries + gqa.cache_width, width),
            q_norm=_vector(gqa.head_dim),
            k_norm=_vector(gqa.head_dim),
            o_proj=self.summed(width, queries),
        )

    def _kda(self) -> PackedKda:
        kda, width = self.config.kda, self.config.hidden_size
        # The ranks of f_a and of a low-rank output gate are the head width.
        inner, rank = kda.width, kda.head_dim
        gate = inner if kda.is_gate_full_rank else rank
        return PackedKda(
            in_proj=self.matrix(3 * inner + gate + rank + kda.num_heads, width),
            f_b=self.matrix(inner, rank),
            g_b=None if kda.is_gate_full_rank else self.matrix(inner, rank),
            conv=_empty((kda.conv_width, 3 * inner), torch.float32),
            decay_scale=_vector(kda.num_heads),
            dt_bias=_vector(inner),
            o_norm=_vector(kda.head_dim),
            o_proj=self.summed(width, inner),
        )

    def _mla(self) -> PackedMla:
        mla, width = self.config.mla, self.config.hidden_size
        queries, values = mla.num_heads * mla.qk_dim, mla.num_heads * mla.v_dim
        columns = mla.cache_width + (values if mla.has_output_gate else 0)
        return PackedMla(
            in_proj=self.matrix((mla.q_rank or queries) + columns, width),
            q_norm=None if mla.q_rank is None else _vector(mla.q_rank),
            q_b=None if mla.q_rank is None else self.matrix(queries, mla.q_rank),
            kv_norm=_vector(mla.kv_rank),
            w_uk=self.matrix(mla.num_heads * mla.kv_rank, mla.nope_dim),
            w_uv=self.matrix(values, mla.kv_rank),
            o_proj=self.summed(width, values),
            cache_scale=None,
        )

    def _gated(self, inner: int, side: int) -> PackedMlp:
        return PackedMlp(self.matrix(2 * inner, side), self.summed(side, inner))

    def _moe(self) -> PackedMoe:
        moe, width = self.config.moe, self.config.hidden_size
        latent = moe.latent_width
        return PackedMoe(
            router=self.router(moe.num_experts, width),
            router_bias=_vector(moe.num_experts),
            latent_down=None if latent is None else self.gathered(latent, width),
            latent_norm=None if latent is None or not moe.has_latent_norm else _vector(latent),
            latent_up=None if latent is None else self.gathered(width, latent),
            shared=self._gated(moe.shared_width, width) if moe.num_shared else None,
            experts=(self._expert(latent or width),) * moe.num_experts,
        )

    def _expert(self, side: int) -> PackedMlp:
        moe = self.config.moe
        if moe.expert_format == "bf16":
            width = moe.expert_width
            return PackedMlp(self.matrix(2 * width, side), self.matrix(side, width))
        coded = _mxfp4_rows if self.mxfp4 == "mxfp4_rows" else _mxfp4_tiles
        return PackedMlp(coded(2 * moe.expert_width, side), coded(side, moe.expert_width))


def _mxfp4_rows(rows: int, cols: int) -> Matrix:
    data, scales = (_empty((rows, cols // part), torch.uint8) for part in (2, MXFP4_GROUP))
    return Matrix("mxfp4_rows", rows, cols, data, scales)


def _mxfp4_tiles(rows: int, cols: int) -> Matrix:
    shape = (num_tiles(rows), cols // MXFP4_GROUP)
    data = _empty((*shape, GROUP_BYTES), torch.uint8)
    return Matrix("mxfp4_tiles", rows, cols, data, _empty((*shape, TILE_ROWS), torch.uint8))


def _integers(kind: MatrixFormat, rows: int, cols: int) -> Matrix:
    shape = (num_tiles(rows), cols // MXFP4_GROUP)
    data = _empty((*shape, INTEGER_BITS[kind] * 64), torch.uint8)
    return Matrix(kind, rows, cols, data, _empty((*shape, TILE_ROWS), torch.bfloat16))


def _vector(size: int) -> Tensor:
    return _empty((size,), torch.float32)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
