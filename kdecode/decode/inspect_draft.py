"""What a draft's round costs: microseconds, and the bytes that it has to move.

Of every forward that a draft can have: the block (its steps one by one, where it has a plan), the
products with the token before and the choice of each draft, and the caching of a round's committed
tokens. One request, on a made-up context, in pages that nobody may use meanwhile and that are given
back. By the host's clock, which waits for the device; plans of a GPU have a clock of their own
(`inspect_draft_device`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from kdecode.cache.caches import Caches
from kdecode.config_draft import DraftConfig
from kdecode.decode.device import on_device, wait_for
from kdecode.decode.draft_device import CudaDraft
from kdecode.decode.draft_specialized import SpecializedDraft
from kdecode.decode.draft_standard import ContextRows, DraftRequest, StandardDraft, first_choices
from kdecode.decode.inspect import PlanCost, StepCost
from kdecode.decode.inspect_draft_device import microseconds, time_round
from kdecode.decode.traffic import verify_state_bytes

_BF16_BYTES = 2


@dataclass(frozen=True)
class DraftCost:
    """Medians over the runs. plan: the block's steps; None of a draft that runs in torch. block: up
    to the logits of all rows. markov: of all drafts of a round, with their choice and what is
    expected of them. append: of the rows of a round, the anchor's and each draft's.
    """

    plan: PlanCost | None
    num_drafts: int
    block_microseconds: float
    block_bytes: float
    markov_microseconds: float
    markov_bytes: float
    append_microseconds: float
    append_bytes: float


TimedDraft = SpecializedDraft | CudaDraft | StandardDraft


def inspect_draft(
    draft: TimedDraft, caches: Caches, num_drafts: int, context_tokens: int, runs: int
) -> DraftCost:
    """Raises ValueError without runs, and PoolExhaustedError if there are no pages for it."""
    if runs < 1:
        raise ValueError(f"{runs} timed runs; there has to be at least 1.")
    pages = caches.allocate_pages(context_tokens + num_drafts + 1)
    try:
        generator = torch.Generator().manual_seed(0)
        for pool in caches.draft.values():
            for page in pages:
                # Drawn on the host, so that they are the same on every device.
                pool[page].copy_(torch.randn(pool.shape[1:], generator=generator) * 0.5)
        shape = (num_drafts + 1, len(draft.config.taps), draft.config.hidden_size)
        device = str(next(iter(caches.draft.values())).device)
        taps = torch.randn(shape, generator=generator).bfloat16().to(device)
        request = DraftRequest(1, context_tokens, pages)
        with on_device(device):
            if isinstance(draft, CudaDraft):
                return _on_device(draft, request, taps, runs)
            if isinstance(draft, StandardDraft):
                return _in_torch(draft, request, taps, runs, device)
            return _native(draft, request, taps, runs)
    finally:
        caches.free_pages(pages)


def _on_device(draft: CudaDraft, request: DraftRequest, taps: torch.Tensor, runs: int) -> DraftCost:
    cost = time_round(draft, request, taps, runs, _seen_tokens(draft.config, request))
    return DraftCost(
        plan=cost.block,
        num_drafts=draft.num_drafts,
        block_microseconds=cost.block.plan_microseconds,
        block_bytes=cost.block.num_bytes,
        markov_microseconds=microseconds(cost.choices),
        markov_bytes=sum(step.num_bytes for step in cost.choices),
        append_microseconds=microseconds(cost.append),
        append_bytes=sum(step.num_bytes for step in cost.append),
    )


def _native(
    draft: SpecializedDraft, request: DraftRequest, taps: torch.Tensor, runs: int
) -> DraftCost:
    timed = [_native_round(draft, request, taps) for _ in range(runs + 1)][1:]
    count, whole = draft.num_drafts, median(entry.stack for entry in timed)
    plan = PlanCost(
        backend=draft.plan.backend,
        rows=count,
        context_tokens=request.num_tokens,
        steps=_steps(draft, timed, _seen_tokens(draft.config, request)),
        plan_microseconds=whole,
        rows_per_request=count,
    )
    return DraftCost(
        plan=plan,
        num_drafts=count,
        block_microseconds=whole,
        block_bytes=plan.num_bytes,
        markov_microseconds=median(entry.block for entry in timed) - whole,
        markov_bytes=count * draft.markov_bytes,
        append_microseconds=median(entry.append for entry in timed),
        append_bytes=draft.append_bytes,
    )


def _in_torch(
    draft: StandardDraft, request: DraftRequest, taps: torch.Tensor, runs: int, device: str
) -> DraftCost:
    count = taps.shape[0] - 1

    def stack() -> None:
        draft.stack([request], count)

    timed = []
    for _ in range(runs + 1):
        append = _microseconds(lambda: _append(draft, request, taps), device)
        block = _microseconds(lambda: _block(draft, request, count), device)
        timed.append(_Timed(append, block, _microseconds(stack, device)))
    timed, whole = timed[1:], median(entry.stack for entry in timed[1:])
    seen = _seen_tokens(draft.config, request) + count
    cached = draft.config.num_layers * seen * draft.config.cache_width * _BF16_BYTES
    return DraftCost(
        plan=None,
        num_drafts=count,
        block_microseconds=whole,
        block_bytes=draft.stack_bytes + cached,
        # Of two runs, one with the choices and one without.
        markov_microseconds=max(median(entry.block for entry in timed) - whole, 0.0),
        markov_bytes=count * draft.markov_bytes,
        append_microseconds=median(entry.append for entry in timed),
        append_bytes=draft.append_bytes,
    )


def _seen_tokens(config: DraftConfig, request: DraftRequest) -> int:
    """Of the context, whatever the block sees of itself."""
    tokens = request.num_tokens
    return tokens if config.window is None else min(tokens, config.window)


@dataclass(frozen=True)
class _Timed:
    append: float
    block: float
    stack: float
    steps: tuple[float, ...] = ()


def _microseconds(run: Callable[[], None], device: str = "cpu") -> float:
    begin = time.perf_counter_ns()
    run()
    wait_for(device)
    return (time.perf_counter_ns() - begin) / 1000


def _append(draft: TimedDraft, request: DraftRequest, taps: torch.Tensor) -> None:
    draft.append([ContextRows(request.num_tokens, request.pages, taps)])


def _block(draft: TimedDraft, request: DraftRequest, num_drafts: int) -> None:
    draft.block([request], num_drafts, first_choices)


def _native_round(draft: SpecializedDraft, request: DraftRequest, taps: torch.Tensor) -> _Timed:
    return _Timed(
        append=_microseconds(lambda: _append(draft, request, taps)),
        block=_microseconds(lambda: _block(draft, request, draft.num_drafts)),
        stack=_microseconds(draft.plan.run),
        steps=tuple(_microseconds(step.run) for step in draft.plan.steps),
    )


def _steps(
    draft: SpecializedDraft, timed: list[_Timed], context_tokens: int
) -> tuple[StepCost, ...]:
    config, rows = draft.plan.config, draft.num_drafts
    return tuple(
        StepCost(
            layer=step.layers[0],
            op=step.op,
            impl=step.impl,
            covers=step.covers,
            microseconds=median(entry.steps[index] for entry in timed),
            weight_bytes=float(step.weight_bytes or 0),
            state_bytes=sum(
                verify_state_bytes(config, layer, stage, context_tokens, _BF16_BYTES, rows)
                for layer, stage in step.stages
            ),
            distinct_experts=None,
        )
        for index, step in enumerate(draft.plan.steps)
    )
