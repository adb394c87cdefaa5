"""Models packed for CUDA, plans of theirs on `DEVICE`, and caches for them and for the oracle.

Without a GPU the plan of CUDA runs in Triton's interpreter: its deployment says "cuda" and keeps
its tensors on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from native_cases import FP8_SCALE, PAGE_TOKENS, Loaded, fill, make_requests
from triton_cases import ARCH, k3_config, linear_config

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.config import GpuKernels, ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.deployment import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.verify import copy_caches
from kdecode.kernels.contract import PlanMemory
from kdecode.testing.poison import poison_


def _short(config: ModelConfig) -> ModelConfig:
    """A KDA layer with a dense MLP, a KDA and an MLA layer with experts."""
    return replace(config, layer_kinds=("kda", "kda", "mla"), mlp_kinds=("dense", "moe", "moe"))


_SMALL = {"num_experts": 6, "top_k": 2, "expert_width": 32}
# Each kind of layer once; quick in the interpreter.
CONFIGS = {
    "k3": _short(k3_config(**_SMALL, latent_width=64)),
    "linear": _short(linear_config(**_SMALL)),
}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_CONTEXT = 256


def deployment(
    config: ModelConfig, cache_dtype: str = "bf16", gpu_kernels: GpuKernels = "triton"
) -> Deployment:
    return Deployment(
        config=config,
        device="cuda",
        isa="",
        threads=None,
        cache_dtype=cache_dtype,
        page_tokens=PAGE_TOKENS,
        max_context_tokens=MAX_CONTEXT,
        arch=ARCH,
        tensors=DEVICE,
        gpu_kernels=gpu_kernels,
    )


@dataclass(frozen=True)
class Twins:
    """Two sets of caches with equal contents: the plan's on `DEVICE`, the oracle's on the CPU."""

    ours: Caches
    theirs: Caches

    @staticmethod
    def of(loaded: Loaded, cache_dtype: str = "bf16") -> Twins:
        theirs, config = loaded.caches(cache_dtype), loaded.packed.config
        scales = dict.fromkeys(range(config.num_layers), FP8_SCALE)
        size = theirs.num_slots, theirs.num_pages, PAGE_TOKENS
        ours = Caches.allocate(config, DEVICE, *size, cache_dtype=cache_dtype, scales=scales)
        return Twins(ours, theirs)

    def fill(self, batch: StepBatch, seed: int) -> None:
        """NaN where no request of the batch is."""
        fill(self.theirs, batch.requests, seed)
        copy_caches(self.theirs, self.ours)


def build(
    loaded: Loaded,
    caches: Caches,
    rows: int,
    each: int = 1,
    memory: PlanMemory | None = None,
    gpu_kernels: GpuKernels = "triton",
    **settings: Any,
) -> DecodePlan:
    """settings: other fields of `Deployment`."""
    where = replace(deployment(loaded.packed.config, caches.cache_dtype, gpu_kernels), **settings)
    return latency_specialized.build(where, loaded.packed, caches, rows, each, memory)


def poison(plan: DecodePlan) -> None:
    """Everything that a step writes."""
    for tensor in plan.buffers.values():
        poison_(tensor)
    for effects in getattr(plan.buffers, "effects", {}).values():
        for tensor in (effects.keys, effects.decays, effects.corrections, effects.samples):
            poison_(tensor)


def decode_batch(contexts: list[int], turn: int = 0) -> StepBatch:
    """turn: other slots and pages for the same rows."""
    return StepBatch(make_requests([*range(turn), *contexts])[turn:])


def verify_batch(contexts: list[int], each: int, turn: int = 0) -> StepBatch:
    """Requests of ``each`` rows, an anchor and drafts."""
    longer = [context + each for context in contexts]
    requests = make_requests([*range(turn), *longer])[turn:]
    return StepBatch(
        tuple(
            replace(
                request,
                token_ids=tuple((31 * row + 7 * place + 3) % 90 for place in range(each)),
                start=contexts[row],
                all_logits=True,
                is_verify=True,
            )
            for row, request in enumerate(requests)
        )
    )
