"""Packed weights: the one store that both backends of an engine read.

Owns the order in which projections of one input are joined into one matrix (`unpack.py` is the way
back) and the place of the tensors. Does not know checkpoint names (`weights.py`) or kernels.
Matrices keep their bits, but in integer formats; vectors become fp32, exact from bf16. Computed
here, in fp32: exp(A_log), and the product of a residual mix's norm weight and score projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from kdecode.config import LosslessPacking, ModelConfig
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.matrix import (
    INTEGER_BITS,
    ROW_FORMATS,
    TILE_ROWS,
    Matrix,
    empty_huge,
    pack_rows,
    pack_tiles,
)
from kdecode.model.gated_layout import ExpertPacker, Mxfp4Format, interleaved, pair_tiles
from kdecode.model.parameters import (
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    MoeParameters,
)
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import Ranks

TrunkFormat = Literal["rows", "tiles", "tiles12", "int8_tiles", "int4_tiles"]
_Packed = TypeVar("_Packed")


@dataclass(frozen=True)
class PackedKda:
    in_proj: Matrix  # [3D + G + A + H, M]: q, k, v, g (or g_a), f_a, b
    f_b: Matrix  # [D, A]
    g_b: Matrix | None  # [D, G] with a low-rank gate
    conv: Tensor  # [W, 3D] fp32, tap-major, newest tap last; channels q, k, v
    decay_scale: Tensor  # [H] fp32, exp(A_log)
    dt_bias: Tensor  # [D] fp32
    o_norm: Tensor  # [V] fp32
    o_proj: Matrix  # [M, D]


@dataclass(frozen=True)
class PackedMla:
    in_proj: Matrix  # [q_rank or H*qk_dim, + kv_rank + rope_dim, + H*v_dim with a gate; M]
    q_norm: Tensor | None  # [q_rank] fp32
    q_b: Matrix | None  # [H*qk_dim, q_rank]
    kv_norm: Tensor  # [kv_rank] fp32
    w_uk: (
        Matrix  # [H*kv_rank, nope_dim]: head h's W_UK transposed, so that q_latent = w_uk[h] q_nope
    )
    w_uv: Matrix  # [H*v_dim, kv_rank]
    o_proj: Matrix  # [M, H*v_dim]
    cache_scale: Tensor | None  # fp32 scalar of an fp8 cache


@dataclass(frozen=True)
class PackedGqa:
    """Of a draft's stack; packed by `model/draft_tiles.py`."""

    in_proj: Matrix  # [H*K + 2*Hkv*K, M]: q, k, v
    q_norm: Tensor  # [K] fp32, for every head
    k_norm: Tensor  # [K] fp32
    o_proj: Matrix  # [M, H*K]


@dataclass(frozen=True)
class PackedMlp:
    # [2*width, M]. "rows", "mxfp4_rows": gate rows, then up rows. Tile formats: 16 gate rows, 16 up
    # rows, alternating, so that one thread has both halves of a product; width is a multiple of 16
    # there.
    gate_up: Matrix
    down: Matrix  # [M, width]; of several ranks see `partial_format`


@dataclass(frozen=True)
class PackedMoe:
    router: Matrix  # [E, M]
    router_bias: Tensor  # [E] fp32
    latent_down: Matrix | None  # [L, M]
    latent_norm: Tensor | None  # [L] fp32
    latent_up: Matrix | None  # [M, L]
    shared: PackedMlp | None
    # E; width F, model side L or M. Those in "rows" and "mxfp4_rows" are one `ExpertStack`.
    experts: tuple[PackedMlp, ...]


@dataclass(frozen=True)
class PackedLayer:
    input_norm: Tensor  # [M] fp32
    post_norm: Tensor  # [M] fp32
    attn_mix: Tensor | None  # [M] fp32, norm weight times score projection
    mlp_mix: Tensor | None
    attention: PackedKda | PackedMla | PackedGqa
    mlp: PackedMlp | PackedMoe


@dataclass(frozen=True)
class PackedModel:
    config: ModelConfig
    embed: Tensor  # [vocab, M] bf16, row-major
    layers: tuple[PackedLayer, ...]
    final_mix: Tensor | None  # [M] fp32
    norm: Tensor  # [M] fp32
    head: Matrix  # [vocab, M]


def pack_model(
    reader: CheckpointReader,
    trunk_format: TrunkFormat,
    progress: Callable[[int, int], None] | None = None,
    device: str = "cpu",
    isa: str | None = None,
    mxfp4: Mxfp4Format | None = None,
) -> PackedModel:
    """Packs a checkpoint layer by layer; each layer's mapped pages are given back once copied.

    device: where the packed tensors stay; they are made on the host, a layer at a time, so that it
    never holds a second model. isa: of the kernels that prove "tiles12" exact, None for the best; a
    matrix that does not pack well is in "tiles" there. Integers are rounded: every matrix but the
    router and MXFP4 experts, if its columns are a multiple of 32. progress(layers done, layers).
    mxfp4: of MXFP4 experts; None for what the device's kernels read. A rank's reader gives its
    share of the model, with the configuration of it.

    Raises CheckpointError for a bad or incomplete checkpoint and ValueError for a size that the
    format cannot hold.
    """
    if trunk_format not in get_args(TrunkFormat):
        raise ValueError(
            f"trunk_format is {trunk_format!r}; it must be one of "
            f"{', '.join(get_args(TrunkFormat))}."
        )
    config = reader.config
    partial = partial_format(trunk_format, device, reader.ranks)
    pack = _Packer(config, trunk_format, isa, mxfp4 or mxfp4_format(device), partial)
    embed = pack_rows([reader.load_embed()]).data
    reader.drop_outside()
    layers = []
    for number in range(config.num_layers):
        with reader.layer(number) as parameters:
            layers.append(to_device(pack.layer(parameters), device))
        if progress is not None:
            progress(number + 1, config.num_layers)
    final_mix, norm, lm_head = reader.load_head()
    packed = PackedModel(
        config=config,
        embed=embed,
        layers=tuple(layers),
        final_mix=_folded_mix(final_mix),
        norm=norm.float(),
        head=pack.matrix(lm_head),
    )
    reader.drop_outside()
    reader.finish()
    return to_device(packed, device)


def pack_layer(
    p: LayerParameters, config: ModelConfig, trunk_format: TrunkFormat, isa: str | None
) -> PackedLayer:
    """One layer that is not part of a checkpoint's model: a draft's."""
    return _Packer(config, trunk_format, isa).layer(p)


def pack_matrix(weight: Tensor, trunk_format: TrunkFormat, isa: str | None) -> Matrix:
    """One bf16 matrix, as those of a trunk in this format."""
    return _packed_matrix([weight], trunk_format, isa)


def _packed_matrix(weights: Sequence[Tensor], trunk_format: TrunkFormat, isa: str | None) -> Matrix:
    if trunk_format == "rows":
        return pack_rows(weights)
    joined = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    return _packed_tiles(pack_tiles(joined), trunk_format, isa, None)


def _packed_tiles(
    matrix: Matrix, trunk_format: TrunkFormat, isa: str | None, out: Tensor | None
) -> Matrix:
    """A matrix in "tiles", in 12 bits a weight or in integers if that is the format and it can be.

    out: memory for one of 12 bits.
    """
    if trunk_format in INTEGER_BITS:
        from kdecode.kernels.common.integers import quantise_tiles

        return quantise_tiles(matrix, trunk_format) or matrix
    if trunk_format != "tiles12":
        return matrix
    # Needs the native library, which engines with other formats do without.
    from kdecode.kernels.common.packed12 import pack12

    return pack12(matrix, isa, out) or matrix


def mxfp4_format(device: str) -> Mxfp4Format:
    """How the kernels of a device read MXFP4 experts."""
    return "mxfp4_rows" if torch.device(device).type == "cuda" else "mxfp4_tiles"


def partial_format(trunk_format: TrunkFormat, device: str, ranks: Ranks) -> TrunkFormat:
    """How a rank has the matrices outside the experts whose products are parts of a sum.

    Those are wanted in fp32, and of "rows" a CPU has no such product in torch; tiles have one.
    """
    is_host = torch.device(device).type == "cpu"
    return "tiles" if is_host and trunk_format == "rows" and not ranks.is_alone else trunk_format


def tile_format(isa: str, packing: LosslessPacking) -> TrunkFormat:
    """How the native kernels' bf16 matrices are stored."""
    from kdecode.kernels.common.packed12 import FAST_ISAS

    if packing == "auto":
        packing = "on" if isa in FAST_ISAS else "off"
    return "tiles12" if packing == "on" else "tiles"


def to_device(packed: _Packed, device: str) -> _Packed:
    """The same tensors on another device: of a tensor, a tuple or a dataclass of such.

    What is there already is not copied, and anything else is returned as it is. Experts that lie in
    one block do so there.
    """
    moved: Any = packed
    if isinstance(packed, Tensor):
        moved = packed.to(device)
    elif _is_stack(packed):
        stack = to_device(ExpertStack.of(packed), device)  # type: ignore[arg-type]
        moved = tuple(PackedMlp(*pair) for pair in stack.matrices())
    elif isinstance(packed, tuple):
        moved = tuple(to_device(item, device) for item in packed)
    elif is_dataclass(packed) and not isinstance(packed, type | ModelConfig):
        parts = {f.name: to_device(getattr(packed, f.name), device) for f in fields(packed)}
        moved = replace(packed, **parts)
    result: _Packed = moved
    return result


def _is_stack(packed: object) -> bool:
    """Whether these are the experts of a layer, in one block."""
    if not isinstance(packed, tuple) or not packed or not isinstance(packed[0], PackedMlp):
        return False
    return packed[0].gate_up.format in ROW_FORMATS


@dataclass(frozen=True)
class _Packer:
    config: ModelConfig
    trunk_format: TrunkFormat
    isa: str | None
    mxfp4: Mxfp4Format = "mxfp4_tiles"
    # Of matrices whose products are parts of a sum; None as the others.
    partial: TrunkFormat | None = None

    def layer(self, p: LayerParameters) -> PackedLayer:
        attention, mlp = p.attention, p.mlp
        return PackedLayer(
            input_norm=p.input_norm.float(),
            post_norm=p.post_norm.float(),
            attn_mix=_folded_mix(p.attn_mix),
            mlp_mix=_folded_mix(p.mlp_mix),
            attention=(
                self._kda(attention)
                if isinstance(attention, KdaParameters)
                else self._mla(attention)
            ),
            mlp=self._gated(mlp) if isinstance(mlp, MlpParameters) else self._moe(mlp),
        )

    def matrix(self, weight: Tensor) -> Matrix:
        return self._joined([weight])

    def _joined(self, weights: Sequence[Tensor | None]) -> Matrix:
        """Projections of one input, one below the other."""
        present = [weight for weight in weights if weight is not None]
        return _packed_matrix(present, self.trunk_format, self.isa)

    def _partial(self, weight: Tensor) -> Matrix:
        """A matrix of which a rank may have some columns."""
        return _packed_matrix([weight], self.partial or self.trunk_format, self.isa)

    def _packed(self, matrix: Matrix, out: Tensor | None = None) -> Matrix:
        return _packed_tiles(matrix, self.trunk_format, self.isa, out)

    def _optional(self, weight: Tensor | None) -> Matrix | None:
        return None if weight is None else self.matrix(weight)

    def _kda(self, p: KdaParameters) -> PackedKda:
        gate = p.g_proj if p.g_proj is not None else p.g_a_proj
        return PackedKda(
            in_proj=self._joined([p.q_proj, p.k_proj, p.v_proj, gate, p.f_a_proj, p.b_proj]),
            f_b=self.matrix(p.f_b_proj),
            g_b=self._optional(p.g_b_proj),
            conv=torch.cat([p.q_conv, p.k_conv, p.v_conv]).t().contiguous(),
            decay_scale=p.a_log.exp(),
            dt_bias=p.dt_bias,
            o_norm=p.o_norm,
            o_proj=self._partial(p.o_proj),
        )

    def _mla(self, p: MlaParameters) -> PackedMla:
        mla = self.config.mla
        query = p.q_proj if p.q_a_proj is None else p.q_a_proj
        heads = p.kv_b_proj.view(mla.num_heads, mla.nope_dim + mla.v_dim, mla.kv_rank)
        w_uk = heads[:, : mla.nope_dim].transpose(1, 2).reshape(-1, mla.nope_dim)
        return PackedMla(
            in_proj=self._joined([query, p.kv_a_proj, p.g_proj]),
            q_norm=None if p.q_a_norm is None else p.q_a_norm.float(),
            q_b=self._optional(p.q_b_proj),
            kv_norm=p.kv_a_norm.float(),
            w_uk=self.matrix(w_uk),
            w_uv=self.matrix(heads[:, mla.nope_dim :].reshape(-1, mla.kv_rank)),
            o_proj=self._partial(p.o_proj),
            cache_scale=p.k_scale,
        )

    def _gated(self, p: MlpParameters) -> PackedMlp:
        if self.trunk_format == "rows":
            return PackedMlp(self._joined([p.gate_proj, p.up_proj]), self._partial(p.down_proj))
        rows, cols = p.gate_proj.shape
        data = empty_huge((pair_tiles(rows), cols // 2, TILE_ROWS, 2), torch.bfloat16)
        gate_up = interleaved(p.gate_proj, p.up_proj, data, None)
        return PackedMlp(self._packed(gate_up), self._partial(p.down_proj))

    def _moe(self, p: MoeParameters) -> PackedMoe:
        return PackedMoe(
            router=self._router(p.router),
            router_bias=p.router_bias,
            latent_down=self._optional(p.latent_down),
            latent_norm=None if p.latent_norm is None else p.latent_norm.float(),
            latent_up=self._optional(p.latent_up),
            shared=None if p.shared is None else self._gated(p.shared),
            experts=tuple(PackedMlp(*pair) for pair in self._experts().experts(p)),
        )

    def _experts(self) -> ExpertPacker:
        is_coded = self.config.moe.expert_format == "mxfp4"
        return ExpertPacker(is_coded, self.trunk_format, self.mxfp4, self._packed)

    def _router(self, weight: Tensor) -> Matrix:
        """Never in integers: it is small, and another choice of experts costs much."""
        exact: TrunkFormat = "tiles" if self.trunk_format in INTEGER_BITS else self.trunk_format
        return _packed_matrix([weight], exact, self.isa)


def _folded_mix(mix: MixParameters | None) -> Tensor | None:
    return None if mix is None else mix.norm.float() * mix.proj.float()
