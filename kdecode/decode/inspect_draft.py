"""What a draft's round costs on the native plan: microseconds, and the bytes that it has to move.

The steps of the block's plan one by one and as one call, the Markov products with the choice of
each draft, and the caching of a round's committed tokens. On made-up contexts, in pages that nobody
may use meanwhile and that are given back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from kdecode.cache.caches import Caches
from kdecode.decode.draft_specialized import SpecializedDraft
from kdecode.decode.draft_standard import ContextRows, DraftRequest
from kdecode.decode.inspect import PlanCost, StepCost
from kdecode.decode.traffic import verify_state_bytes

_BF16_BYTES = 2


@dataclass(frozen=True)
class DraftCost:
    """Medians over the runs. plan: the block. markov: of all drafts of a round, with their choice.

    append: of the rows of a round, the anchor's and each draft's.
    """

    plan: PlanCost
    num_drafts: int
    markov_microseconds: float
    markov_bytes: int
    append_microseconds: float
    append_bytes: int


def inspect_draft(
    draft: SpecializedDraft, caches: Caches, context_tokens: int, runs: int
) -> DraftCost:
    """Raises ValueError without runs, and PoolExhaustedError if there are no pages for it."""
    if runs < 1:
        raise ValueError(f"{runs} timed runs; there has to be at least 1.")
    count = draft.num_drafts
    pages = caches.allocate_pages(context_tokens + count + 1)
    try:
        generator = torch.Generator().manual_seed(0)
        for pool in caches.draft.values():
            rows = torch.randn((len(pages), *pool.shape[1:]), generator=generator) * 0.5
            pool[list(pages)] = rows.to(pool.dtype)
        taps = torch.randn(
            (count + 1, len(draft.config.taps), draft.config.hidden_size), generator=generator
        ).bfloat16()
        request = DraftRequest(1, context_tokens, pages)
        timed = [_round(draft, request, taps) for _ in range(runs + 1)][1:]
    finally:
        caches.free_pages(pages)
    whole = median(entry.plan for entry in timed)
    return DraftCost(
        plan=PlanCost(
            backend=draft.plan.backend,
            rows=count,
            context_tokens=context_tokens,
            steps=_steps(draft, timed, context_tokens),
            plan_microseconds=whole,
            rows_per_request=count,
        ),
        num_drafts=count,
        markov_microseconds=median(entry.block for entry in timed) - whole,
        markov_bytes=count * draft.markov_bytes,
        append_microseconds=median(entry.append for entry in timed),
        append_bytes=draft.append_bytes,
    )


@dataclass(frozen=True)
class _Timed:
    append: float
    block: float
    plan: float
    steps: tuple[float, ...]


def _round(draft: SpecializedDraft, request: DraftRequest, taps: torch.Tensor) -> _Timed:
    begin = time.perf_counter_ns()
    draft.append([ContextRows(request.num_tokens, request.pages, taps)])
    appended = time.perf_counter_ns()
    draft.block([request], draft.num_drafts, lambda place, logits: logits.argmax(-1).tolist())
    drafted = time.perf_counter_ns()
    draft.plan.run()
    planned = time.perf_counter_ns()
    steps = []
    for step in draft.plan.steps:
        first = time.perf_counter_ns()
        step.run()
        steps.append((time.perf_counter_ns() - first) / 1000)
    return _Timed(
        (appended - begin) / 1000,
        (drafted - appended) / 1000,
        (planned - drafted) / 1000,
        tuple(steps),
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
