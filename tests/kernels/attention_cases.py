"""Layers for the tests of the attention ops: packed weights, buffers, caches, all poisoned.

Packing is written apart from `model/layout.py` on purpose: a mistake there cannot hide one here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from tile_packer import pack
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.native import Pool
from kdecode.kernels.contract import Buffers, Problem, Tolerance
from kdecode.model.parameters import (
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
)
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close
from kdecode.testing.poison import poison_, poisoned

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

# (kv_rank, nope_dim, rope_dim, v_dim, heads) and (head_dim, heads): odd block counts on purpose.
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "small": ((64, 32, 16, 32, 3), (16, 3)),
    "uneven": ((48, 16, 16, 48, 18), (48, 2)),
    "wide": ((512, 128, 64, 128, 2), (128, 2)),
}


def model(form: str, size: str = "small") -> ModelConfig:
    """form "k3" or "linear" (see testing/cases.py), with sizes that the native kernels take."""
    config = tiny_k3() if form == "k3" else tiny_linear(5)
    (kv_rank, nope, rope, v_dim, heads), (head_dim, kda_heads) = SIZES[size]
    mla = replace(
        config.mla, num_heads=heads, kv_rank=kv_rank, nope_dim=nope, rope_dim=rope, v_dim=v_dim
    )
    kda = replace(config.kda, num_heads=kda_heads, head_dim=head_dim)
    # Dense MLPs only, which nobody runs here, so that drawing the parameters is quick.
    return replace(config, mla=mla, kda=kda, mlp_kinds=("dense",) * config.num_layers)


@lru_cache
def layer_parameters(config: ModelConfig, layer: int, seed: int = 0) -> LayerParameters:
    """Seeded parameters of one layer; gate biases cover both ends of the decay's functions."""
    p = random_parameters(config, seed).layers[layer]
    if isinstance(p.attention, KdaParameters):
        spread = torch.linspace(-9.0, 25.0, config.kda.width)
        shuffled = spread[torch.randperm(len(spread), generator=generator(seed))]
        p = replace(p, attention=replace(p.attention, dt_bias=shuffled))
    return p


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def pack_layer(p: LayerParameters, config: ModelConfig) -> Any:
    """The fields of `PackedLayer` that the attention ops read."""
    attention = (
        _pack_kda(p.attention)
        if isinstance(p.attention, KdaParameters)
        else _pack_mla(p.attention, config)
    )
    return SimpleNamespace(
        input_norm=p.input_norm.float(), attn_mix=_fold(p.attn_mix), attention=attention
    )


def _fold(weights: MixParameters | None) -> Tensor | None:
    return None if weights is None else weights.norm.float() * weights.proj.float()


def _pack_kda(p: KdaParameters) -> Any:
    gate = p.g_proj if p.g_proj is not None else p.g_a_proj
    in_proj = torch.cat([p.q_proj, p.k_proj, p.v_proj, gate, p.f_a_proj, p.b_proj])
    return SimpleNamespace(
        in_proj=pack(in_proj),
        f_b=pack(p.f_b_proj),
        g_b=None if p.g_b_proj is None else pack(p.g_b_proj),
        conv=torch.cat([p.q_conv, p.k_conv, p.v_conv]).T.contiguous(),
        decay_scale=p.a_log.exp(),
        dt_bias=p.dt_bias,
        o_norm=p.o_norm,
        o_proj=pack(p.o_proj),
    )


def _pack_mla(p: MlaParameters, config: ModelConfig) -> Any:
    mla = config.mla
    query = p.q_proj if p.q_proj is not None else p.q_a_proj
    parts = [query, p.kv_a_proj] + ([] if p.g_proj is None else [p.g_proj])
    per_head = p.kv_b_proj.view(mla.num_heads, -1, mla.kv_rank)
    w_uk, w_uv = per_head.split([mla.nope_dim, mla.v_dim], dim=1)
    return SimpleNamespace(
        in_proj=pack(torch.cat(parts)),
        q_norm=None if p.q_a_norm is None else p.q_a_norm.float(),
        q_b=None if p.q_b_proj is None else pack(p.q_b_proj),
        kv_norm=p.kv_a_norm.float(),
        w_uk=pack(w_uk.transpose(1, 2).reshape(-1, mla.nope_dim)),
        w_uv=pack(w_uv.reshape(-1, mla.kv_rank)),
        o_proj=pack(p.o_proj),
    )


@dataclass(frozen=True)
class Setting:
    """Where a step runs: instruction set, pool and what the deployment fixes."""

    isa: str
    pool: Pool
    cache_dtype: str = "bf16"
    page_tokens: int = 16
    max_context_tokens: int = 512

    def problem(self, config: ModelConfig, layer: int, rows: int) -> Problem:
        return Problem(
            config=config,
            layer=layer,
            rows=rows,
            rows_per_request=1,
            device="cpu",
            cache_dtype=self.cache_dtype,
            page_tokens=self.page_tokens,
            max_context_tokens=self.max_context_tokens,
            isa=self.isa,
        )


def buffers_of(config: ModelConfig, layer: int, inputs: Tensor, setting: Setting) -> Buffers:
    """Poisoned buffers of one attention layer, its prefix from ``inputs`` [S + 1, R, M].

    The last of the inputs is the prefix, those before it are the snapshots.
    """
    rows, width = inputs.shape[1:]
    kda, mla = config.kda, config.mla
    gate = kda.width if kda.is_gate_full_rank else kda.head_dim
    query = mla.num_heads * mla.qk_dim if mla.q_rank is None else mla.q_rank
    value = mla.num_heads * mla.v_dim
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "attn_mix": ((rows, width), BF16),
        "attn_in": ((rows, width), BF16),
        "attn_delta": ((rows, width), BF16),
    }
    if config.layer_kinds[layer] == "kda":
        shapes |= {
            "kda_proj": ((rows, 3 * kda.width + gate + kda.head_dim + kda.num_heads), BF16),
            "kda_qkv": ((rows, 3 * kda.width), BF16),
            "kda_decay": ((rows, kda.num_heads, kda.head_dim), FP32),
            "kda_beta": ((rows, kda.num_heads), FP32),
            "kda_out": ((rows, kda.num_heads, kda.head_dim), BF16),
            "attn_out": ((rows, kda.width), BF16),
        }
    else:
        columns = query + mla.cache_width + (value if mla.has_output_gate else 0)
        shapes |= {
            "mla_proj": ((rows, columns), BF16),
            "mla_query": ((rows, mla.num_heads, mla.cache_width), BF16),
            "mla_latent": ((rows, mla.num_heads, mla.kv_rank), BF16),
            "attn_out": ((rows, value), BF16),
        }
    buffers = Buffers({name: poisoned(*spec) for name, spec in shapes.items()})
    buffers["prefix"] = inputs[-1].clone()
    if config.attn_res_block is not None:
        snapshots = poisoned((config.num_snapshots, rows, width), BF16)
        snapshots[: len(inputs) - 1] = inputs[:-1]
        buffers["snapshots"] = snapshots
    buffers.pool = setting.pool
    return buffers


def inputs_of(config: ModelConfig, layer: int, rows: int, seed: int = 1) -> Tensor:
    """[S + 1, R, M]: the snapshots that the layer's attention sees, and the prefix."""
    block = config.attn_res_block
    snapshots = 0 if block is None else len(range(0, layer, block))
    return rows_of((snapshots + 1, rows, config.hidden_size), seed)


def run_poisoned(step: Any, buffers: Buffers) -> None:
    """Runs a prepared step with NaN in all scratch memory."""
    for name, tensor in buffers.items():
        if name.startswith("scratch."):
            poison_(tensor)
    step.run()


def compare(
    buffers: Buffers, expected: dict[str, Tensor], tolerance: Tolerance, what: str = ""
) -> None:
    """Every named buffer within the tolerance of its reference."""
    for name, gold in expected.items():
        assert_close(buffers[name], gold.view(buffers[name].shape), tolerance, f"{what} {name}")
