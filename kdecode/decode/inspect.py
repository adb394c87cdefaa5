"""What every step of a plan costs: microseconds, and the bytes that it has to move.

Owns timing a plan step by step on caches of a given length, and joining the times with the bytes of
`traffic`. Experts are counted as the routing of the timed tokens chose them. A probe borrows slots
and pages of the caches, which nobody may use meanwhile, and gives them back. Knows no kernels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from types import TracebackType
from typing import Self

import torch

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.budget import item_bytes
from kdecode.cache.caches import Caches
from kdecode.decode.auto import load_step
from kdecode.decode.device import on_device, wait_for
from kdecode.decode.plan import DecodePlan, Step
from kdecode.decode.runner import callers_threads, load_inputs
from kdecode.decode.traffic import (
    commit_bytes,
    expert_bytes,
    runs_experts,
    stage_state_bytes,
    verify_state_bytes,
)
from kdecode.model.layout import PackedModel


@dataclass(frozen=True)
class StepCost:
    """One step of a plan, over all timed runs.

    microseconds: the median. weight_bytes: with each expert counted once a run, whichever rows
    chose it. state_bytes: state and cache of all rows, read and written. distinct_experts: mean
    over the runs; None for a step without experts. launches: of a CUDA graph of the step, where it
    was counted. exchanges: between ranks, inside of the step or the step itself.
    """

    layer: int | None
    op: str
    impl: str
    covers: tuple[str, ...]
    microseconds: float
    weight_bytes: float
    state_bytes: int
    distinct_experts: float | None
    launches: int | None = None
    exchanges: int = 0

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.state_bytes


@dataclass(frozen=True)
class PlanCost:
    """A plan's steps, and `plan_microseconds`: the median of runs that were not interrupted to time
    single steps (one native call, where the plan has one). Of a verify step also what it costs to
    move the slots past all of its rows. timed_as: in words, where it was not the host's clock.
    gpu_exchange: what the ranks' GPUs gave each other their parts through, where all were timed."""

    backend: str
    rows: int
    context_tokens: int
    steps: tuple[StepCost, ...]
    plan_microseconds: float
    rows_per_request: int = 1
    commit_microseconds: float | None = None
    commit_bytes: int = 0
    timed_as: str = ""
    gpu_exchange: str | None = None

    @property
    def num_bytes(self) -> float:
        """Of the step; `commit_bytes` are apart."""
        return sum(step.num_bytes for step in self.steps)


class PlanProbe:
    """Runs a plan on made-up requests of ``context_tokens`` tokens each; a context manager.

    rows_per_request: above 1 for verify steps, whose first row is the last of those tokens.

    The state and the cached rows are random numbers in memory that has been written (memory that
    never was would be read from one page of zeros), and every run has new random tokens.
    """

    def __init__(
        self,
        packed: PackedModel,
        plan: DecodePlan,
        caches: Caches,
        rows: int,
        context_tokens: int,
        num_threads: int,
        rows_per_request: int = 1,
    ) -> None:
        if rows % rows_per_request:
            raise ValueError(f"{rows} rows are not requests of {rows_per_request} rows each.")
        self._each = rows_per_request
        self._packed, self._plan, self._caches = packed, plan, caches
        self._rows, self._context_tokens = rows, context_tokens
        self._is_static = plan.rows is not None
        # The native pool owns the cores in its own plans; torch's threads would only fight it.
        self._device = str(next(iter(_pools(caches))).device)
        self._has_one_thread = self._is_static and self._device == "cpu"
        self._num_threads = num_threads
        self._random = random.Random(0)
        self._slots: list[int] = []
        self._pages: list[tuple[int, ...]] = []

    def __enter__(self) -> Self:
        try:
            tokens = self._context_tokens + self._each - 1
            for _ in range(self._rows // self._each):
                self._slots.append(self._caches.allocate_slot())
                self._pages.append(self._caches.allocate_pages(tokens))
        except BaseException:
            self._release()
            raise
        self._fill()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def measure(self, runs: int) -> PlanCost:
        """``runs`` runs timed step by step, and as many whole; one more of each comes first."""
        if runs < 1:
            raise ValueError(f"{runs} timed runs; there has to be at least 1.")
        whole, commits, single = [], [], []
        with torch.no_grad(), callers_threads(), on_device(self._device):
            torch.set_num_threads(1 if self._has_one_thread else self._num_threads)
            for _ in range(runs + 1):
                whole.append(self._timed_run())
                commits.append(self._microseconds(self._commit))
                single.append(self._timed_steps())
                self._commit()
        is_verify = self._each > 1
        moved = self._requests * commit_bytes(self._plan.config, self._each)
        # The first of each met cold caches and, with torch, kernels that had not been chosen yet.
        return PlanCost(
            backend=self._plan.backend,
            rows=self._rows,
            context_tokens=self._context_tokens,
            steps=tuple(
                self._cost(step, [run[index] for run in single[1:]])
                for index, step in enumerate(self._plan.steps)
            ),
            plan_microseconds=median(whole[1:]),
            rows_per_request=self._each,
            commit_microseconds=median(commits[1:]) if is_verify else None,
            commit_bytes=moved if is_verify else 0,
        )

    @property
    def _requests(self) -> int:
        return self._rows // self._each

    def _commit(self) -> None:
        """Moves the slots of a verify step past all of its rows; nothing after another step."""
        self._caches.commit(dict.fromkeys(self._slots, self._each) if self._each > 1 else {})

    def _timed_run(self) -> float:
        self._load()
        return self._microseconds(self._plan.run)

    def _timed_steps(self) -> list[tuple[float, int | None]]:
        """Microseconds of each step, and the distinct experts of those that run experts."""
        self._load()
        timed: list[tuple[float, int | None]] = []
        for step in self._plan.steps:
            spent = self._microseconds(step.run)
            experts = None
            if runs_experts(step.op, step.covers):
                chosen = self._plan.buffers["route_ids"][: self._rows]
                experts = len(set(chosen.flatten().tolist()))
            timed.append((spent, experts))
        return timed

    def _cost(self, step: Step, runs: Sequence[tuple[float, int | None]]) -> StepCost:
        experts = None
        weight_bytes = float(step.weight_bytes or 0)
        if runs_experts(step.op, step.covers) and step.layers[0] is not None:
            experts = fmean(count for _, count in runs if count is not None)
            more = experts - self._plan.config.moe.top_k
            weight_bytes += more * expert_bytes(self._packed, step.layers[0], step.op)
        item, context = item_bytes(self._caches.cache_dtype), self._context_tokens
        config, each = self._plan.config, self._each
        state = sum(
            stage_state_bytes(config, layer, stage, context, item)
            if each == 1
            else verify_state_bytes(config, layer, stage, context, item, each)
            for layer, stage in step.stages
        )
        return StepCost(
            layer=step.layers[0],
            op=step.op,
            impl=step.impl,
            covers=step.covers,
            microseconds=median(spent for spent, _ in runs),
            weight_bytes=weight_bytes,
            state_bytes=self._requests * state,
            distinct_experts=experts,
            exchanges=len(step.exchanges),
        )

    def _load(self) -> None:
        vocab = self._plan.config.vocab_size
        requests = tuple(
            StepRequest(
                token_ids=tuple(self._random.randrange(vocab) for _ in range(self._each)),
                start=self._context_tokens - 1,
                slot=slot,
                pages=pages,
                is_decode=True,
                all_logits=self._each > 1,
                is_verify=self._each > 1,
            )
            for slot, pages in zip(self._slots, self._pages, strict=True)
        )
        load = load_inputs if self._is_static else load_step
        load(self._plan, StepBatch(requests))

    def _fill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for slot in self._slots:
            for state in (*self._caches.conv.values(), *self._caches.recurrent.values()):
                # Drawn on the host, so that they are the same on every device.
                drawn = torch.empty(state.shape[1:], dtype=state.dtype)
                state[slot].copy_(drawn.normal_(std=0.1, generator=generator))
        for cache in self._caches.pages.values():
            for page in (page for pages in self._pages for page in pages):
                rows = torch.empty(cache.shape[1:], dtype=torch.float32)
                cache[page].copy_(rows.normal_(std=0.5, generator=generator))

    def _release(self) -> None:
        for slot in self._slots:
            self._caches.free_slot(slot)
        for pages in self._pages:
            self._caches.free_pages(pages)
        self._slots, self._pages = [], []

    def _microseconds(self, run: Callable[[], None]) -> float:
        """With what the device still has to do of it."""
        wait_for(self._device)
        start = time.perf_counter_ns()
        run()
        wait_for(self._device)
        return (time.perf_counter_ns() - start) / 1000


def _pools(caches: Caches) -> Iterator[torch.Tensor]:
    yield from (*caches.conv.values(), *caches.recurrent.values(), *caches.pages.values())
