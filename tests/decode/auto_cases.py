"""Small models for the tests of the standard forward: packed weights, caches, the oracle's run.

Packing is written apart from `model/layout.py`, from the docstrings of its dataclasses, so that a
mistake there cannot hide one here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from tile_packer import by_turns, pack
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.auto import build_auto_plan, run_standard
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.common.matrix import Matrix
from kdecode.model import reference
from kdecode.model.layout import (
    PackedKda,
    PackedLayer,
    PackedMla,
    PackedMlp,
    PackedModel,
    PackedMoe,
)
from kdecode.model.parameters import (
    ExpertWeight,
    KdaParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
    Mxfp4,
)
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.poison import poison_except_

PAGE_TOKENS = 16
# Of an fp8 latent cache. Not 1, so that a scale applied twice or never shows.
FP8_SCALE = 0.25


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    parameters: ModelParameters
    packed: PackedModel


def make_model(
    form: str,
    trunk: str = "rows",
    seed: int = 0,
    change_moe: Callable[[MoeParameters], MoeParameters] = lambda moe: moe,
) -> Model:
    """form "k3" (MXFP4 experts) or "linear" (bf16 experts); trunk "rows" or "tiles"."""
    config = tiny_k3() if form == "k3" else tiny_linear()
    if form == "k3":
        config = replace(config, moe=replace(config.moe, expert_format="mxfp4"))
    parameters = random_parameters(config, seed)
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in parameters.layers:
        mlp = layer.mlp
        if isinstance(mlp, MoeParameters):
            mlp = change_moe(_decided(mlp, generator))
            mlp = _quantised(mlp, generator) if form == "k3" else mlp
        layers.append(replace(layer, mlp=mlp))
    parameters = replace(parameters, layers=tuple(layers))
    return Model(config, parameters, packed_model(config, parameters, trunk))


def _decided(moe: MoeParameters, generator: torch.Generator) -> MoeParameters:
    """Biases so far apart that no rounding changes a choice of experts; weights stay free.

    A near-tie that falls the other way is right, but changes all that comes after it. Free choices
    are tested on the op.
    """
    places = torch.randperm(len(moe.router_bias), generator=generator)
    return replace(moe, router_bias=2.0 * places.float())


def _quantised(moe: MoeParameters, generator: torch.Generator) -> MoeParameters:
    def draw(weight: ExpertWeight) -> Mxfp4:
        rows, cols = weight.shape
        packed = torch.randint(0, 256, (rows, cols // 2), generator=generator)
        scale = torch.randint(120, 123, (rows, cols // 32), generator=generator)
        return Mxfp4(packed.to(torch.uint8), scale.to(torch.uint8))

    drawn = {name: tuple(draw(w) for w in getattr(moe, name)) for name in ("w1", "w3", "w2")}
    return replace(moe, **drawn)


def packed_model(config: ModelConfig, parameters: ModelParameters, trunk: str) -> PackedModel:
    """trunk "rows" or "tiles"; MXFP4 experts are in tiles in both."""
    return _Packer(config, trunk).model(parameters)


@dataclass(frozen=True)
class _Packer:
    config: ModelConfig
    trunk: str

    def model(self, p: ModelParameters) -> PackedModel:
        layers = []
        for layer in p.layers:
            is_kda = isinstance(layer.attention, KdaParameters)
            attention = self._kda(layer.attention) if is_kda else self._mla(layer.attention)
            is_dense = isinstance(layer.mlp, MlpParameters)
            mlp = self._mlp(layer.mlp) if is_dense else self._moe(layer.mlp)
            norms = (layer.input_norm.float(), layer.post_norm.float())
            mixes = (_fold(layer.attn_mix), _fold(layer.mlp_mix))
            layers.append(PackedLayer(*norms, *mixes, attention, mlp))
        return PackedModel(
            self.config,
            p.embed,
            tuple(layers),
            _fold(p.final_mix),
            p.norm.float(),
            self._matrix(p.lm_head),
        )

    def _matrix(self, *parts: Tensor | None) -> Matrix:
        joined = torch.cat([part for part in parts if part is not None])
        return Matrix("rows", *joined.shape, joined) if self.trunk == "rows" else pack(joined)

    def _optional(self, weight: Tensor | None) -> Matrix | None:
        return None if weight is None else self._matrix(weight)

    def _kda(self, p: KdaParameters) -> PackedKda:
        gate = p.g_proj if p.g_proj is not None else p.g_a_proj
        return PackedKda(
            in_proj=self._matrix(p.q_proj, p.k_proj, p.v_proj, gate, p.f_a_proj, p.b_proj),
            f_b=self._matrix(p.f_b_proj),
            g_b=self._optional(p.g_b_proj),
            conv=torch.cat([p.q_conv, p.k_conv, p.v_conv]).T.contiguous(),
            decay_scale=p.a_log.exp(),
            dt_bias=p.dt_bias,
            o_norm=p.o_norm,
            o_proj=self._matrix(p.o_proj),
        )

    def _mla(self, p: MlaParameters) -> PackedMla:
        mla = self.config.mla
        query = p.q_proj if p.q_proj is not None else p.q_a_proj
        per_head = p.kv_b_proj.view(mla.num_heads, -1, mla.kv_rank)
        w_uk, w_uv = per_head.split([mla.nope_dim, mla.v_dim], dim=1)
        return PackedMla(
            in_proj=self._matrix(query, p.kv_a_proj, p.g_proj),
            q_norm=None if p.q_a_norm is None else p.q_a_norm.float(),
            q_b=self._optional(p.q_b_proj),
            kv_norm=p.kv_a_norm.float(),
            w_uk=self._matrix(w_uk.transpose(1, 2).reshape(-1, mla.nope_dim)),
            w_uv=self._matrix(w_uv.reshape(-1, mla.kv_rank)),
            o_proj=self._matrix(p.o_proj),
            cache_scale=None,
        )

    def _mlp(self, p: MlpParameters) -> PackedMlp:
        return self._pair(p.gate_proj, p.up_proj, p.down_proj)

    def _pair(self, gate: ExpertWeight, up: ExpertWeight, down: ExpertWeight) -> PackedMlp:
        if isinstance(gate, Mxfp4):
            packed = by_turns(gate.packed, up.packed)
            joined = Mxfp4(packed, by_turns(gate.scale, up.scale))
            return PackedMlp(pack(joined), pack(down))
        if self.trunk == "tiles":
            return PackedMlp(pack(by_turns(gate, up)), pack(down))
        return PackedMlp(self._matrix(gate, up), self._matrix(down))

    def _moe(self, p: MoeParameters) -> PackedMoe:
        return PackedMoe(
            router=self._matrix(p.router),
            router_bias=p.router_bias,
            latent_down=self._optional(p.latent_down),
            latent_norm=None if p.latent_norm is None else p.latent_norm.float(),
            latent_up=self._optional(p.latent_up),
            shared=None if p.shared is None else self._mlp(p.shared),
            experts=self._experts(p),
        )

    def _experts(self, p: MoeParameters) -> tuple[PackedMlp, ...]:
        """Those in "rows" lie in one block."""
        if self.trunk == "tiles" or isinstance(p.w1[0], Mxfp4):
            return tuple(self._pair(*parts) for parts in zip(p.w1, p.w3, p.w2, strict=True))
        pairs = [torch.cat(parts) for parts in zip(p.w1, p.w3, strict=True)]
        blocks = zip(torch.stack(pairs), torch.stack(p.w2), strict=True)
        return tuple(
            PackedMlp(*(Matrix("rows", *data.shape, data) for data in block)) for block in blocks
        )


def _fold(mix: MixParameters | None) -> Tensor | None:
    return None if mix is None else mix.norm.float() * mix.proj.float()


@dataclass
class Session:
    """One set of caches with its plan, and the requests running on it. Free memory is poisoned."""

    model: Model
    cache_dtype: str = "bf16"
    num_slots: int = 4
    num_pages: int = 48
    device: str = "cpu"
    caches: Caches = field(init=False)
    plan: DecodePlan = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        engine = EngineConfig(
            device=self.device,
            cache_dtype=self.cache_dtype,
            cache_scale=FP8_SCALE if self.cache_dtype == "fp8" else None,
            page_tokens=PAGE_TOKENS,
        )
        self.caches = Caches.allocate(
            config,
            self.device,
            self.num_slots,
            self.num_pages,
            PAGE_TOKENS,
            cache_dtype=self.cache_dtype,
            scales=self.scales,
        )
        poison_except_(self.pools, ())
        self.plan = build_auto_plan(self.model.packed, self.caches, engine)

    @property
    def scales(self) -> dict[int, float]:
        kinds = self.model.config.layer_kinds
        scale = FP8_SCALE if self.cache_dtype == "fp8" else 1.0
        return {layer: scale for layer, kind in enumerate(kinds) if kind == "mla"}

    @property
    def pools(self) -> list[Tensor]:
        caches = self.caches
        return [*caches.conv.values(), *caches.recurrent.values(), *caches.pages.values()]

    def start(self, max_tokens: int = 256, skip_pages: int = 0) -> Request:
        """A request with a cleared slot and poisoned pages; skip_pages leaves holes before them."""
        holes = self.caches.page_pool.allocate(skip_pages)
        pages = self.caches.allocate_pages(max_tokens)
        self.caches.free_pages(holes)
        return Request(self.caches.allocate_slot(), pages)

    def run(self, *shares: tuple[Request, list[int]]) -> Tensor:
        """One step of these requests' next tokens; logits [requests, vocab]."""
        requests = tuple(request.take(tokens) for request, tokens in shares)
        return run_standard(self.plan, StepBatch(requests))


@dataclass
class Request:
    slot: int
    pages: tuple[int, ...]
    num_tokens: int = 0
    is_decode: bool = False

    def take(self, tokens: list[int]) -> StepRequest:
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(tokens)
        return StepRequest(tuple(tokens), start, self.slot, self.pages, self.is_decode)


@dataclass
class Oracle:
    """The rounded reference, fed one request's tokens."""

    model: Model
    cache_dtype: str = "bf16"
    state: reference.RequestState = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self.state = reference.RequestState.new(
            config, reference.ROUNDED, self.cache_dtype, FP8_SCALE
        )

    def run(self, tokens: list[int]) -> Tensor:
        """Logits [T, vocab]."""
        parameters, config = self.model.parameters, self.model.config
        ids = torch.tensor(tokens)
        return reference.forward(parameters, config, ids, self.state, reference.ROUNDED)


def tokens_of(count: int, seed: int, vocab: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
