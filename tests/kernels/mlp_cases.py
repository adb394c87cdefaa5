"""One layer of a small model for tests of native MLP ops: parameters, packed weights, buffers.

The packing is written apart from `model/layout.py`, from the byte orders that native.h documents,
so that a mistake in the packer cannot hide one in a kernel. No width is a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from tile_packer import by_turns, pack
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.decode.buffers import input_buffers, value_buffers
from kdecode.kernels.common.native import NativeStep, Pool
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.table import implementation
from kdecode.model.parameters import (
    ExpertWeight,
    LayerParameters,
    MixParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
    Mxfp4,
)
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.poison import poison_, poisoned

# A layer that sees some of the snapshots, but not all, with snapshots before layers 0, 2 and 4.
MOE_LAYER = 3
NUM_EXPERTS, TOP_K = 24, 5
# Each number of rows of one pass over a tile, then numbers that take several passes.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64)


def latent_config(expert_format: str = "mxfp4", has_latent_norm: bool = True) -> ModelConfig:
    """K3's form: SiTU, residual mix, latent experts, two shared experts."""
    return _resize(
        tiny_k3(),
        expert_format=expert_format,
        latent_width=96 if expert_format == "mxfp4" else 90,
        expert_width=96 if expert_format == "mxfp4" else 48,
        has_latent_norm=has_latent_norm,
    )


def plain_config(expert_format: str = "bf16", num_shared: int = 1) -> ModelConfig:
    """Kimi-Linear's form: SiLU, plain residual, experts at the model width."""
    return _resize(
        tiny_linear(), expert_format=expert_format, expert_width=96, num_shared=num_shared
    )


def _resize(config: ModelConfig, **moe: Any) -> ModelConfig:
    width = 160 if moe["expert_format"] == "mxfp4" else 106
    sizes = replace(config.moe, num_experts=NUM_EXPERTS, top_k=TOP_K, **moe)
    return replace(config, hidden_size=width, vocab_size=77, dense_width=112, moe=sizes)


@dataclass(frozen=True)
class OpCase:
    """A model, and what ops are prepared from."""

    config: ModelConfig
    parameters: ModelParameters

    def layer(self, layer: int) -> LayerParameters:
        return self.parameters.layers[layer]

    def moe(self, layer: int = MOE_LAYER) -> MoeParameters:
        mlp = self.layer(layer).mlp
        assert isinstance(mlp, MoeParameters)
        return mlp

    def problem(self, layer: int | None, rows: int | None, isa: str) -> Problem:
        return Problem(self.config, layer, rows, 1, "cpu", "bf16", 16, 64, isa)

    def packed(self, layer: int | None) -> Any:
        return pack_model(self.parameters) if layer is None else pack_layer(self.layer(layer))


def make_case(config: ModelConfig, seed: int = 0) -> OpCase:
    """Seeded parameters; MXFP4 experts have random codes and scales of a usual size."""
    parameters = random_parameters(config, seed)
    if config.moe.expert_format == "mxfp4":
        generator = torch.Generator().manual_seed(seed)
        layers = tuple(
            replace(layer, mlp=_quantised(layer.mlp, generator))
            if isinstance(layer.mlp, MoeParameters)
            else layer
            for layer in parameters.layers
        )
        parameters = replace(parameters, layers=layers)
    return OpCase(config, parameters)


def _quantised(moe: MoeParameters, generator: torch.Generator) -> MoeParameters:
    def draw(weight: ExpertWeight) -> Mxfp4:
        rows, cols = weight.shape
        packed = torch.randint(0, 256, (rows, cols // 2), generator=generator)
        scale = torch.randint(119, 123, (rows, cols // 32), generator=generator)
        return Mxfp4(packed.to(torch.uint8), scale.to(torch.uint8))

    return replace(
        moe,
        w1=tuple(draw(w) for w in moe.w1),
        w3=tuple(draw(w) for w in moe.w3),
        w2=tuple(draw(w) for w in moe.w2),
    )


# Packing.


def _interleave(gate: ExpertWeight, up: ExpertWeight) -> ExpertWeight:
    """Gate and up rows by turns of 16."""
    if isinstance(gate, Mxfp4):
        assert isinstance(up, Mxfp4)
        return Mxfp4(by_turns(gate.packed, up.packed), by_turns(gate.scale, up.scale))
    assert isinstance(up, Tensor)
    return by_turns(gate, up)


def _pack_mlp(gate: ExpertWeight, up: ExpertWeight, down: ExpertWeight) -> SimpleNamespace:
    return SimpleNamespace(gate_up=pack(_interleave(gate, up)), down=pack(down))


def _fold(mix: MixParameters | None) -> Tensor | None:
    return None if mix is None else mix.norm.float() * mix.proj.float().reshape(-1)


def pack_layer(layer: LayerParameters) -> SimpleNamespace:
    """The fields of a `PackedLayer` that the MLP ops read."""
    fields = SimpleNamespace(post_norm=layer.post_norm.float(), mlp_mix=_fold(layer.mlp_mix))
    mlp = layer.mlp
    if isinstance(mlp, MlpParameters):
        fields.mlp = _pack_mlp(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return fields
    shared = mlp.shared
    fields.mlp = SimpleNamespace(
        router=pack(mlp.router),
        router_bias=mlp.router_bias,
        latent_down=None if mlp.latent_down is None else pack(mlp.latent_down),
        latent_norm=None if mlp.latent_norm is None else mlp.latent_norm.float(),
        latent_up=None if mlp.latent_up is None else pack(mlp.latent_up),
        shared=None
        if shared is None
        else _pack_mlp(shared.gate_proj, shared.up_proj, shared.down_proj),
        experts=tuple(_pack_mlp(*parts) for parts in zip(mlp.w1, mlp.w3, mlp.w2, strict=True)),
    )
    return fields


def pack_model(parameters: ModelParameters) -> SimpleNamespace:
    """The fields of a `PackedModel` that embed and head read."""
    return SimpleNamespace(
        embed=parameters.embed,
        final_mix=_fold(parameters.final_mix),
        norm=parameters.norm.float(),
        head=pack(parameters.lm_head),
    )


# Buffers, steps, comparison.


def make_buffers(config: ModelConfig, rows: int, pool: Pool) -> Buffers:
    """Every buffer of a plan, poisoned."""
    buffers = Buffers()
    for spec in (*input_buffers(rows, 4), *value_buffers(config, rows)):
        buffers[spec.name] = poisoned([int(size) for size in spec.shape], spec.dtype)
    buffers.pool = pool
    return buffers


def prepare(case: OpCase, op: str, layer: int | None, buffers: Buffers, isa: str) -> NativeStep:
    """The native step of an op, with poisoned scratch."""
    rows = buffers["prefix"].shape[0]
    step = implementation(op, "cpu").prepare(
        case.problem(layer, rows, isa), case.packed(layer), buffers
    )
    for name, tensor in buffers.items():
        if name.startswith("scratch."):
            poison_(tensor)
    assert isinstance(step, NativeStep)
    return step


def fill_residual(case: OpCase, buffers: Buffers, num_snapshots: int, seed: int = 1) -> None:
    """Random `prefix` and the first snapshots; the rest of `snapshots` stays poisoned."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(num_snapshots + 1, *buffers["prefix"].shape, generator=generator)
    buffers["prefix"].copy_(draw[-1])
    if case.config.attn_res_block is not None:
        buffers["snapshots"][:num_snapshots] = draw[:-1].to(torch.bfloat16)


def assert_rounded_alike(actual: Tensor, expected: Tensor, name: str, share: float = 0.05) -> None:
    """bf16 values that are equal but for roundings that fell the other way.

    At most ``share`` of the elements may differ, none by more than two units in the last place of
    the tensor's RMS or of its own, whichever is larger.
    """
    wide, gold = actual.double(), expected.double()
    size = torch.maximum(gold.abs(), gold.square().mean().sqrt())
    worst = ((wide - gold).abs() / size).max()
    assert worst <= 2.0**-6, f"{name}: off by {worst:.3g} of its size"
    different = (wide != gold).double().mean()
    assert different <= share, f"{name}: {different:.1%} of the elements differ"
