"""CUDA graphs of the standard forward, for steps in which every request has one row.

Owns the static form of such a step's `StepTensors`, which the graph derives from staged inputs, and
recording; of several ranks a graph has their exchanges, and all record the same. What a graph
leaves in its buffers lies in the pool's memory: it is read before another graph of the pool runs.
Other steps are launched by torch, one operation after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.decode.buffers import input_buffers
from kdecode.decode.graph import GraphPool, StepRange, made_up_inputs
from kdecode.decode.plan import DecodePlan
from kdecode.decode.staging import Staging
from kdecode.kernels.common.step import DecodeRows, RequestSpan, StepTensors
from kdecode.kernels.contract import Buffers, PlanMemory

# Ops whose torch form asks the device for numbers, or loops over requests.
_WAITING_OPS = frozenset({"kda_conv", "kda_recurrence", "mla_attention", "route", "experts"})


def waiting_ops(plan: DecodePlan) -> list[str]:
    """What of the standard plan waits for the device in a step of single rows. A plan with such an
    operation cannot be recorded; it has some where Triton is not there, and where ranks share the
    positions of a context."""
    return sorted(
        {step.op for step in plan.steps if step.op in _WAITING_OPS and step.impl != "triton"}
    )


def takes(batch: StepBatch) -> bool:
    """Whether a step is one that is recorded: one row a request, and logits of each."""
    return all(
        len(request.token_ids) == 1 and request.needs_logits and not request.is_verify
        for request in batch.requests
    )


def record(
    plan: DecodePlan, rows: int, max_pages: int, pool: GraphPool, ranges: Sequence[StepRange]
) -> DecodePlan:
    """The standard plan as a static one of so many rows; `load_inputs` loads it.

    ranges: of steps, one after the other, a graph each: only they can be run. The plan runs once
    before, as `graph.capture` says; of several ranks it does so on all of them, at the same time.
    """
    static = Buffers(memory=PlanMemory(plan.buffers.products.device))
    staging = Staging(input_buffers(rows, max_pages), static.memory, "row_inputs")
    static.staging, static.caches = staging, plan.buffers.caches
    static.limits = plan.buffers.limits
    made_up_inputs(staging, 1)
    page_tokens, exchange = static.limits.page_tokens, plan.buffers.exchange

    def run(begin: int, end: int) -> None:
        if begin == 0:
            if exchange is not None:
                exchange.rewind()
            plan.buffers.step = _step_tensors(staging.tensors, page_tokens)
        for step in plan.steps[begin:end]:
            step.run()

    with torch.no_grad():
        pool.warm_up(lambda: run(0, len(plan.steps)))
        if static.caches.conv:
            static.caches.clear_slot(0)
        replays = {}
        for span in ranges:
            graph = pool.record(lambda span=span: run(*span))  # type: ignore[misc]
            replays[span] = graph, dict(plan.buffers)
    launch = _launch_of(replays, static)
    return replace(plan, rows=rows, buffers=static, launch=launch, launched_as="CUDA graphs")


def _launch_of(
    replays: dict[StepRange, tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]], buffers: Buffers
) -> Callable[[int, int], None]:
    def launch(begin: int, end: int) -> None:
        graph, values = replays[begin, end]
        graph.replay()
        # Where the graph has left them: a name has another tensor after each of its writers.
        buffers.update(values)

    return launch


def _step_tensors(inputs: dict[str, Tensor], page_tokens: int) -> StepTensors:
    """Of one row a request, from a static plan's inputs on the device."""
    position, pages = inputs["row_position"], inputs["row_pages"]
    rows = position.shape[0]
    place = (position // page_tokens).long().unsqueeze(1)
    page = pages.gather(1, place).squeeze(1).long()
    order = torch.arange(rows, device=position.device)
    return StepTensors(
        num_rows=rows,
        token_ids=inputs["row_token"].long(),
        cache_rows=page * page_tokens + position % page_tokens,
        # Their number counts; where each is, kernels read on the device.
        single=tuple(RequestSpan(row, row + 1, 0, 0, page, None) for row in range(rows)),
        multi=(),
        single_rows=order,
        single_slots=inputs["row_slot"].long(),
        logits_rows=order,
        num_logits=rows,
        decode_rows=DecodeRows(None, 1, position, pages),
    )
