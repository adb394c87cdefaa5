"""Steps of the standard forward on ranks that are threads, and what they have against one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.auto import build_auto_plan, run_standard
from kdecode.kernels.contract import Exchange, Tolerance
from kdecode.model.layout import TrunkFormat, pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import ALONE, Ranks
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poison_
from kdecode.testing.ranks import run_ranks

# The bounds of one rank against the reference.
LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)
STATE = Tolerance(rtol=0.0, atol=0.25, rms_ratio=1.5e-2)
ROWS = Tolerance(rtol=0.0, atol=0.4, rms_ratio=2.5e-2)
FAMILIES = {"k3": "mini_16_checkpoint", "linear": "mini_linear_16_checkpoint"}
PAGE_TOKENS, NUM_PAGES, NUM_SLOTS = 16, 12, 3
CACHE_SCALE = 0.05
# A verify step of four rows, of which so many stay.
DRAFTED, KEPT = 4, 2


@dataclass(frozen=True)
class Setting:
    """How a model is run. interleave: of ranks that share the positions; None: each has all."""

    trunk: TrunkFormat = "rows"
    cache_dtype: str = "bf16"
    page_tokens: int = PAGE_TOKENS
    interleave: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Outcome:
    """What one rank has after every step, and at the end."""

    logits: list[Tensor]
    prefixes: list[Tensor]
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]
    pages: dict[int, Tensor]
    context: ContextShare
    config: ModelConfig


def steps(vocab: int) -> list[StepBatch]:
    """A prompt in chunks, a second one beside decoding, decode rows, a verify step, one after it.

    The second request has slot 2 and the later pages.
    """
    tokens = torch.randint(vocab, (120,), generator=torch.Generator().manual_seed(7)).tolist()
    first, second = tuple(range(6)), tuple(range(6, 12))

    def one(begin: int, end: int, start: int, is_decode: bool = False) -> StepRequest:
        return StepRequest(tuple(tokens[begin:end]), start, 0, first, is_decode)

    def other(begin: int, end: int, start: int, is_decode: bool = False) -> StepRequest:
        return StepRequest(tuple(tokens[60 + begin : 60 + end]), start, 2, second, is_decode)

    verified = replace(one(43, 43 + DRAFTED, 43, True), is_verify=True, all_logits=True)
    after = 43 + KEPT
    return [
        StepBatch((one(0, 23, 0),)),
        StepBatch((one(23, 40, 23),)),
        StepBatch((one(40, 41, 40, True), other(0, 30, 0))),
        StepBatch((one(41, 42, 41, True), other(30, 31, 30, True))),
        StepBatch((one(42, 43, 42, True), other(31, 32, 31, True))),
        StepBatch((verified,)),
        StepBatch((one(after, after + 1, after, True), other(32, 33, 32, True))),
    ]


def run_steps(
    directory: Path,
    setting: Setting,
    ranks: Ranks,
    exchange: Exchange | None,
    batches: Sequence[StepBatch] = (),
) -> Outcome:
    """batches: other steps than `steps`."""
    reader = CheckpointReader(directory, ranks=ranks)
    packed = pack_model(reader, setting.trunk, device=setting.device)
    engine = EngineConfig(
        device=setting.device,
        page_tokens=setting.page_tokens,
        max_context_tokens=400,
        cache_dtype=setting.cache_dtype,
    )
    context = WHOLE if setting.interleave is None else ContextShare(ranks, setting.interleave)
    caches = Caches.allocate(
        reader.config,
        setting.device,
        NUM_SLOTS,
        NUM_PAGES,
        setting.page_tokens,
        cache_dtype=setting.cache_dtype,
        scales=dict.fromkeys(range(reader.config.num_layers), CACHE_SCALE),
        context=context,
    )
    # What no step has written must not be read.
    for pool in caches.pages.values():
        poison_(pool)
    plan = build_auto_plan(packed, caches, engine, ranks, exchange)
    logits, prefixes = [], []
    for batch in batches or steps(reader.whole.vocab_size):
        logits.append(run_standard(plan, batch))
        prefixes.append(plan.buffers["prefix"].clone())
        if batch.requests[0].is_verify:
            caches.commit({batch.requests[0].slot: KEPT})
    return Outcome(
        logits, prefixes, caches.conv, caches.recurrent, caches.pages, context, reader.config
    )


def run_all(
    directory: Path,
    size: int,
    setting: Setting | None = None,
    batches: Sequence[StepBatch] = (),
) -> list[Outcome]:
    setting = setting or Setting()
    if size == 1:
        return [run_steps(directory, setting, ALONE, None, batches)]
    return run_ranks(
        size, lambda ranks, exchange: run_steps(directory, setting, ranks, exchange, batches)
    )


def joined_windows(found: list[Outcome], layer: int) -> Tensor:
    """[slots, W - 1, 3D] of all heads: each rank has its own heads' q, k and v."""
    parts = [outcome.conv[layer].chunk(3, dim=-1) for outcome in found]
    return torch.cat([part[place] for place in range(3) for part in parts], dim=-1)


def check(found: list[Outcome], whole: Outcome, rms_ratio: float | None = None) -> None:
    """Of the same steps. rms_ratio: another limit than that of a model of few layers."""

    def limit(tolerance: Tolerance) -> Tolerance:
        return tolerance if rms_ratio is None else replace(tolerance, rms_ratio=rms_ratio)

    for number, gold in enumerate(whole.logits):
        for outcome in found:
            bit_equal(outcome.logits[number], found[0].logits[number], f"logits {number}")
            bit_equal(outcome.prefixes[number], found[0].prefixes[number], f"prefix {number}")
        assert_close(found[0].logits[number], gold, limit(LOGITS), f"logits of step {number}")
    for layer, gold in whole.recurrent.items():
        heads = torch.cat([outcome.recurrent[layer] for outcome in found], dim=1)
        assert_close(heads, gold, limit(STATE), f"states of layer {layer}")
        windows = joined_windows(found, layer)
        assert_close(windows, whole.conv[layer], limit(ROWS), f"windows of {layer}")
    for layer, gold in whole.pages.items():
        for outcome in found:
            bit_equal(outcome.pages[layer], found[0].pages[layer], f"pages of layer {layer}")
        assert_close(found[0].pages[layer], gold, limit(ROWS), f"pages of layer {layer}")
