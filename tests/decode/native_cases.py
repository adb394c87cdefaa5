"""Checkpoints with caches for the tests of the specialised plans; free memory is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig
from kdecode.decode import all_reference
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import resolve
from kdecode.model.layout import PackedModel
from kdecode.model.parameters import ModelParameters
from kdecode.testing.poison import poison_except_, poison_tail_

PAGE_TOKENS = 64
NUM_SLOTS, NUM_PAGES = 10, 48
# For steps of up to 64 rows.
MANY = 66, 160
FP8_SCALE = 0.125


@dataclass(frozen=True)
class Loaded:
    """One checkpoint through the real loader."""

    packed: PackedModel
    parameters: ModelParameters

    def caches(self, cache_dtype: str, *, for_many: bool = False) -> Caches:
        config = self.packed.config
        scales = dict.fromkeys(range(config.num_layers), FP8_SCALE)
        return Caches.allocate(
            config,
            "cpu",
            *(MANY if for_many else (NUM_SLOTS, NUM_PAGES)),
            PAGE_TOKENS,
            cache_dtype=cache_dtype,
            scales=scales if cache_dtype == "fp8" else None,
        )

    def oracle(self, caches: Caches) -> DecodePlan:
        config = self.packed.config
        return all_reference.build(self.parameters, config, caches, page_tokens=PAGE_TOKENS)

    def engine(self, **changes: object) -> EngineConfig:
        if changes.get("cache_dtype") == "fp8":
            changes["cache_scale"] = FP8_SCALE
        base = EngineConfig(
            decode_backend="latency_specialized",
            max_context_tokens=2304,
            # On a busy machine a second thread costs a time slice at every barrier.
            num_threads=1,
            page_tokens=PAGE_TOKENS,
        )
        return resolve(replace(base, **changes))


def make_requests(contexts: list[int]) -> tuple[StepRequest, ...]:
    """Decode rows with these contexts, in slots and pages that are not in order.

    More than NUM_SLOTS of them need the caches for many.
    """
    is_many = len(contexts) > NUM_SLOTS
    num_slots, num_pages = MANY if is_many else (NUM_SLOTS, NUM_PAGES)
    free_pages = iter(range(num_pages - 1, -1, -1))
    requests = []
    for row, context in enumerate(contexts):
        pages = tuple(next(free_pages) for _ in range(context // PAGE_TOKENS + 1))
        slot = num_slots - 1 - row
        requests.append(StepRequest((17 * row + 3,), context, slot, pages, is_decode=True))
    return tuple(requests)


def verify_step(contexts: list[int], each: int) -> StepBatch:
    """A verify step of ``each`` rows a request, which may leave the page that they begin on."""
    requests = []
    for row, request in enumerate(make_requests([context + each for context in contexts])):
        tokens = tuple((31 * row + 7 * place + 3) % 500 for place in range(each))
        start = contexts[row]
        requests.append(
            replace(request, token_ids=tokens, start=start, all_logits=True, is_verify=True)
        )
    return StepBatch(tuple(requests))


def fill(caches: Caches, requests: tuple[StepRequest, ...], seed: int) -> None:
    """Realistic contents where requests live, NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    for pools in (caches.conv, caches.recurrent, caches.pages):
        for layer, pool in pools.items():
            scale = 0.3 if pools is caches.recurrent else 1.0
            values = torch.randn(pool.shape, generator=generator) * scale
            if pools is caches.pages and caches.cache_dtype == "fp8":
                values = values / caches.scales[layer]
            pool.copy_(values.to(pool.dtype))
    poison_except_([*caches.conv.values(), *caches.recurrent.values()], [r.slot for r in requests])
    poison_except_(caches.pages.values(), [p for r in requests for p in r.pages])
    for pages in caches.pages.values():
        for request in requests:
            poison_tail_(pages, request.pages, request.start)
