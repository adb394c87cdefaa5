"""Steps of native plans on several ranks, which are threads, and on one; free memory is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from native_cases import NUM_SLOTS, PAGE_TOKENS, Loaded, fill, make_requests, verify_step
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.decode import latency_specialized
from kdecode.decode.deployment import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import load_inputs
from kdecode.kernels.common.native import Pool, SharedExchange, detect_isa
from kdecode.kernels.contract import Exchange, Tolerance
from kdecode.model.layout import PackedModel, pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import ALONE, Ranks
from kdecode.parallel.shared import Segment, join
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poison_
from kdecode.testing.ranks import run_ranks

# The bounds of one rank against the reference.
LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)
# Of many rows one may choose another expert, near a tie.
LOGITS_OF_MANY = replace(LOGITS, atol=1.0)
STATE = Tolerance(rtol=0.0, atol=0.25, rms_ratio=1.5e-2)
ROWS = Tolerance(rtol=0.0, atol=0.4, rms_ratio=2.5e-2)
CONTEXTS = [62, 1, 130, 0, 17, 63, 5, 31]
MAX_ROWS = 64


@dataclass(frozen=True)
class Family:
    """A checkpoint, whole and as every share that was asked for."""

    directory: Path
    shares: dict[Ranks, PackedModel]

    def share(self, ranks: Ranks) -> PackedModel:
        if ranks not in self.shares:
            self.shares[ranks] = pack_model(CheckpointReader(self.directory, ranks=ranks), "tiles")
        return self.shares[ranks]

    def loaded(self, ranks: Ranks) -> Loaded:
        # No oracle is made of it.
        return Loaded(self.share(ranks), None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """What a rank has after a step."""

    logits: Tensor
    prefix: Tensor
    caches: Caches


def own_part(whole: Tensor, ranks: Ranks, dim: int) -> Tensor:
    begin, end = ranks.span(whole.shape[dim])
    return whole.narrow(dim, begin, end - begin)


def whole_caches(family: Family, batch: StepBatch, cache_dtype: str = "bf16") -> Caches:
    """Those of one rank, before the step."""
    is_many = len(batch.requests) > NUM_SLOTS
    caches = family.loaded(ALONE).caches(cache_dtype, for_many=is_many)
    fill(caches, batch.requests, seed=3)
    return caches


def shared_caches(family: Family, whole: Caches, ranks: Ranks) -> Caches:
    """A rank's part of what the caches of one rank have."""
    is_many = whole.num_slots > NUM_SLOTS
    own = family.loaded(ranks).caches(whole.cache_dtype, for_many=is_many)
    for layer, state in whole.recurrent.items():
        own.recurrent[layer].copy_(own_part(state, ranks, 1))
        windows = [own_part(window, ranks, 2) for window in whole.conv[layer].chunk(3, dim=2)]
        own.conv[layer].copy_(torch.cat(windows, dim=2))
    for layer, pages in whole.pages.items():
        own.pages[layer].copy_(pages)
    return own


def deployment_for(
    family: Family,
    ranks: Ranks,
    shared: SharedExchange | None,
    threads: int = 1,
    isa: str | None = None,
    cache_dtype: str = "bf16",
) -> Deployment:
    return Deployment(
        config=family.share(ranks).config,
        device="cpu",
        isa=isa or detect_isa(),
        threads=Pool(threads, can_oversubscribe=True),
        cache_dtype=cache_dtype,
        page_tokens=PAGE_TOKENS,
        max_context_tokens=2304,
        ranks=ranks,
        shared=shared,
    )


@contextmanager
def segment_for(family: Family, size: int) -> Iterator[Segment]:
    config = family.share(Ranks(0, size)).config
    segment = Segment(size, latency_specialized.exchange_bytes(config, size, MAX_ROWS))
    try:
        yield segment
    finally:
        segment.close()


def join_segment(
    segment: Segment, ranks: Ranks, threads: int = 1, timeout_s: float = 20.0
) -> SharedExchange:
    return join(segment.path, segment.part_bytes, ranks, num_threads=threads, timeout_s=timeout_s)


def build(
    deployment: Deployment, packed: PackedModel, caches: Caches, batch: StepBatch
) -> DecodePlan:
    each = len(batch.requests[0].token_ids)
    plan = latency_specialized.build(deployment, packed, caches, batch.num_rows, each)
    for name, tensor in plan.buffers.items():
        if name != "kept_rows" and not name.startswith("row_"):
            poison_(tensor)
    return plan


def run_native(
    family: Family,
    size: int,
    batches: list[StepBatch],
    whole: Caches,
    kept: int = 1,
    **options: Any,
) -> list[Outcome]:
    """Steps one after the other on every rank; what the ranks have after the last one."""

    def steps(ranks: Ranks, shared: SharedExchange | None) -> Outcome:
        caches = shared_caches(family, whole, ranks)
        deployment = deployment_for(family, ranks, shared, **options)
        for batch in batches:
            plan = build(deployment, family.share(ranks), caches, batch)
            load_inputs(plan, batch)
            plan.run()
            caches.commit({r.slot: kept for r in batch.requests if r.is_verify})
        return Outcome(plan.buffers["logits"], plan.buffers["prefix"], caches)

    if size == 1:
        return [steps(ALONE, None)]
    for rank in range(size):
        family.share(Ranks(rank, size))
    with segment_for(family, size) as segment:

        def body(ranks: Ranks, _: Exchange) -> Outcome:
            return steps(ranks, join_segment(segment, ranks, options.get("threads", 1)))

        return run_ranks(size, body)


def check_together(found: list[Outcome], one: Outcome, batch: StepBatch, kept: int = 1) -> None:
    """The same bits on all ranks, and together what one rank has."""
    for outcome in found[1:]:
        bit_equal(outcome.logits, found[0].logits, "logits")
        bit_equal(outcome.prefix, found[0].prefix, "prefix")
    tolerance = LOGITS if batch.num_rows <= len(CONTEXTS) else LOGITS_OF_MANY
    assert_close(found[0].logits, one.logits, tolerance, "logits")
    slots = [request.slot for request in batch.requests]
    for layer, gold in one.caches.recurrent.items():
        heads = torch.cat([outcome.caches.recurrent[layer] for outcome in found], dim=1)
        assert_close(heads[slots], gold[slots], STATE, f"states of layer {layer}")
        parts = [outcome.caches.conv[layer].chunk(3, dim=2) for outcome in found]
        windows = torch.cat([part[place] for place in range(3) for part in parts], dim=2)
        assert_close(windows[slots], one.caches.conv[layer][slots], ROWS, f"windows of {layer}")
    for layer, gold in one.caches.pages.items():
        for request in batch.requests:
            # Rows behind what stays are nobody's.
            end = request.start + (kept if request.is_verify else len(request.token_ids))
            own = [
                outcome.caches.pages[layer][list(request.pages)].flatten(0, 1)[:end]
                for outcome in found
            ]
            for rows in own[1:]:
                bit_equal(rows, own[0], f"cache rows of layer {layer}")
            expected = gold[list(request.pages)].flatten(0, 1)[:end]
            assert_close(own[0].float(), expected.float(), ROWS, f"cache rows of layer {layer}")


def decode(rows: int) -> StepBatch:
    contexts = [CONTEXTS[row % len(CONTEXTS)] for row in range(rows)]
    return StepBatch(make_requests(contexts))


def verify(requests: int, each: int) -> StepBatch:
    return verify_step(CONTEXTS[:requests], each)
