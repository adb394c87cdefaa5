"""Small drafts, of latent attention and of grouped queries, for tests of their Triton kernels.

Sizes are no powers of two. Weights are packed as CUDA plans read them, on `DEVICE`; memory that no
test wrote is NaN. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton_cases import ARCH, DEVICE

from kdecode.cache.caches import Caches
from kdecode.config import GqaConfig, MlaConfig, ModelConfig
from kdecode.config_draft import DraftConfig, RopeConfig
from kdecode.decode.deployment import Deployment
from kdecode.decode.draft_use import draft_caches
from kdecode.decode.plan import Buffer
from kdecode.decode.staging import stage_inputs
from kdecode.kernels import table
from kdecode.kernels.contract import Buffers, PlanMemory
from kdecode.model.draft_parameters import (
    ConfidenceParameters,
    DraftLayerParameters,
    DraftParameters,
    GqaParameters,
)
from kdecode.model.draft_reference import frequencies
from kdecode.model.draft_tiles import DraftPlanWeights, pack_draft_plan, plan_config
from kdecode.model.layout import to_device
from kdecode.model.parameters import ModelParameters
from kdecode.testing.cases import random_parameters
from kdecode.testing.poison import poison_

PAGE_TOKENS = 8
MAX_CONTEXT = 160
NUM_PAGES = 64

_ROPE = RopeConfig(
    dim=8,
    theta=50_000.0,
    is_interleaved=True,
    factor=32.0,
    original_positions=64,
    amplitude=1.1,
    score_scale=1.3,
)
_CONFIG = DraftConfig(
    hidden_size=160,
    vocab_size=177,
    num_layers=2,
    mlp_width=112,
    rms_eps=1e-5,
    attention=MlaConfig(3, 40, 48, 16, 8, 16, has_output_gate=False, latent_norm_eps=1e-5),
    rope=_ROPE,
    taps=(0, 2, 4),
    tap_stream="prefix",
    has_tap_norms=True,
    is_causal=False,
    window=None,
    max_drafts=7,
    mask_id=176,
    markov_rank=24,
    has_confidence=True,
    has_embed=True,
    has_head=True,
)
# The same draft with grouped-query attention; pairs that turn are halves there.
_GROUPED = replace(
    _CONFIG,
    attention=GqaConfig(num_heads=6, num_kv_heads=2, head_dim=12),
    rope=replace(_ROPE, dim=12, is_interleaved=False),
)


@dataclass(frozen=True)
class DraftCase:
    """deployment: the draft's own."""

    config: DraftConfig
    p: DraftParameters
    weights: DraftPlanWeights
    deployment: Deployment

    def buffers(self, *specs: Buffer) -> Buffers:
        """NaN and absurd integers, over caches of the same."""
        buffers = stage_inputs(specs, PlanMemory(DEVICE))
        for tensor in buffers.values():
            poison_(tensor)
        buffers.caches = self.caches()
        return buffers

    def caches(self) -> Caches:
        target = other_stack(self.config)
        tokens = self.deployment.page_tokens
        caches = Caches.allocate(target, DEVICE, 2, NUM_PAGES, tokens, draft=self.config)
        for pool in caches.draft.values():
            poison_(pool)
        return draft_caches(caches)

    def run(
        self,
        op: str,
        weights: Any,
        buffers: Buffers,
        rows: int,
        each: int = 1,
        layer: int | None = None,
    ) -> None:
        """Prepares an op, fills what it has for scratch with NaN, and runs it."""
        module = table.implementation(op, "triton")
        problem = self.deployment.problem(layer, rows, each)
        assert module.refuse(problem) == []
        prepared = module.prepare(problem, weights, buffers)
        for name, tensor in buffers.items():
            if name.startswith("scratch."):
                poison_(tensor)
        prepared.run()

    def rotation(self, positions: Tensor) -> Tensor:
        """As the host writes it."""
        angles = positions.double()[:, None] * frequencies(self.config.rope)
        turned = torch.cat([angles.cos(), angles.sin()], dim=1) * self.config.rope.amplitude
        return turned.float()


def make_draft_case(seed: int = 0, *, is_grouped: bool = False, **changes: Any) -> DraftCase:
    """is_grouped: with grouped-query attention. changes: of the configuration."""
    config = replace(_GROUPED if is_grouped else _CONFIG, **changes)
    p = _parameters(config, seed)
    deployment = Deployment(
        config=plan_config(config),
        device="cuda",
        isa="",
        threads=None,
        cache_dtype="bf16",
        page_tokens=PAGE_TOKENS,
        max_context_tokens=MAX_CONTEXT,
        rotation_scale=config.rope.score_scale,
        is_causal_block=config.is_causal,
        window=config.window,
        arch=ARCH,
        tensors=DEVICE,
    )
    weights = to_device(pack_draft_plan(p, config, "rows", None), DEVICE)
    return DraftCase(config, p, weights, deployment)


def other_stack(config: DraftConfig) -> ModelConfig:
    """A model of a draft's sizes whose attention any model has: a target, or the draft's own."""
    has_latents = isinstance(config.attention, MlaConfig)
    return plan_config(config if has_latents else replace(config, attention=_CONFIG.attention))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _grouped(config: DraftConfig, gqa: GqaConfig, seed: int) -> GqaParameters:
    width, dim = config.hidden_size, gqa.head_dim
    queries, keys = gqa.num_heads * dim, gqa.num_kv_heads * dim
    norms = 1 + randn(2, dim, seed=seed) * 0.3
    return GqaParameters(
        q_proj=randn(queries, width, seed=seed + 1) * width**-0.5,
        k_proj=randn(keys, width, seed=seed + 2) * width**-0.5,
        v_proj=randn(keys, width, seed=seed + 3) * width**-0.5,
        o_proj=randn(width, queries, seed=seed + 4) * queries**-0.5,
        q_norm=norms[0],
        k_norm=norms[1],
    )


def _layers(
    config: DraftConfig, stack: ModelParameters, seed: int
) -> tuple[DraftLayerParameters, ...]:
    layers = []
    for number, layer in enumerate(stack.layers):
        attention: Any = layer.attention
        if isinstance(config.attention, GqaConfig):
            attention = _grouped(config, config.attention, seed + 100 * (number + 1))
        layers.append(DraftLayerParameters(layer.input_norm, layer.post_norm, attention, layer.mlp))
    return tuple(layers)


def _parameters(config: DraftConfig, seed: int) -> DraftParameters:
    stack = random_parameters(other_stack(config), seed)
    width, taps, rank = config.hidden_size, len(config.taps), config.markov_rank
    norms = 1 + randn(taps + 1, width, seed=seed + 1) * 0.3
    return DraftParameters(
        embed=stack.embed,
        lm_head=stack.lm_head,
        tap_norms=tuple(norms[1:]) if config.has_tap_norms else None,
        context_proj=randn(width, taps * width, seed=seed + 2) * (taps * width) ** -0.5,
        context_norm=norms[0],
        layers=_layers(config, stack, seed),
        norm=stack.norm,
        markov_in=randn(config.vocab_size, rank, seed=seed + 3),
        markov_out=randn(config.vocab_size, rank, seed=seed + 4) * rank**-0.5,
        confidence=ConfidenceParameters(
            randn(width + rank, seed=seed + 5) * width**-0.5, randn(1, seed=seed + 6)
        )
        if config.has_confidence
        else None,
    )
