"""What rounds cost on this machine, measured when an engine is built.

Owns the made-up requests that are timed: they take slots and pages, give all of them back, and
count for nothing. Contexts are short, as the rows of a step decide how much longer it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.decode.device import wait_for
from kdecode.decode.draft_standard import ContextRows, DraftRequest, first_choices
from kdecode.decode.runner import StepRunner, StepStats, callers_threads
from kdecode.speculative.adaptive import StepCosts
from kdecode.speculative.dspark import DraftForward

# The fastest of so many counts: others on the machine only ever make a run longer.
_RUNS = 4
# Requests of the larger steps that are measured.
_MANY = 8


@callers_threads()
def measure_costs(
    runner: StepRunner, caches: Caches, forward: DraftForward, num_drafts: int
) -> StepCosts:
    """Steps of one request and of several with every number of drafts, and a round's block."""
    measured: dict[int, float] = {}
    for count in sorted({1, min(_MANY, caches.num_slots)}):
        slots = [caches.allocate_slot() for _ in range(count)]
        pages = [caches.allocate_pages(num_drafts + 1) for _ in range(count)]
        try:
            for drafts in range(num_drafts + 1):
                parts = zip(slots, pages, strict=True)
                step = StepBatch(tuple(_request(*part, drafts) for part in parts))
                run = partial(_run, runner, caches, step)
                measured[step.num_rows] = _fastest(run, runner.engine.device)
            if count == 1:
                block = _block(runner, forward, pages[0], num_drafts)
                draft = _fastest(block, runner.engine.device)
        finally:
            for slot, own in zip(slots, pages, strict=True):
                caches.free_slot(slot)
                caches.free_pages(own)
    runner.stats = StepStats()
    return StepCosts.of(measured, draft)


def _request(slot: int, pages: tuple[int, ...], drafts: int) -> StepRequest:
    tokens = (0,) * (1 + drafts)
    return StepRequest(
        tokens, 0, slot, pages, is_decode=True, all_logits=True, is_verify=drafts > 0
    )


def _run(runner: StepRunner, caches: Caches, step: StepBatch) -> None:
    """One step, of which nothing stays."""
    runner.run(step)
    for request in step.requests:
        caches.drop_rows(request.slot)


def _block(
    runner: StepRunner, forward: DraftForward, pages: tuple[int, ...], num_drafts: int
) -> Callable[[], object]:
    """A round's proposal behind one cached token."""
    assert runner.last_taps is not None
    forward.append([ContextRows(0, pages, runner.last_taps[:1])])
    request = DraftRequest(0, 1, pages)
    return lambda: forward.block([request], num_drafts, first_choices)


def _fastest(run: Callable[[], object], device: str) -> float:
    """Seconds; the first run meets cold caches and does not count."""
    run()
    times = []
    for _ in range(_RUNS):
        wait_for(device)
        begin = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - begin)
    return min(times)
