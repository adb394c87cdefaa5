"""A draft's forward on a GPU, by the plans of `draft_cuda`.

A round of greedy drafts is one replay for as many requests as a plan has, and the host reads the
drafts once, behind the last of them. Where drafts are drawn, the host draws: then the block is a
replay, and each place one more, behind the tokens that were drawn for the place before it.

Committed tokens of a round are cached by the passes of `draft_cuda`; of a prompt, as far as it has
more than a pass has rows, by products of the device's own library (`draft_rows`).

Owns which requests share a plan. The rows of a block are written behind the request's own, where
committed ones overwrite them; a request without a page for them has nobody's pages to itself for
as long as its block runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config_draft import DraftConfig
from kdecode.decode import draft_cuda
from kdecode.decode.deployment import Deployment
from kdecode.decode.device import on_device
from kdecode.decode.draft_cuda import ContextProgram
from kdecode.decode.draft_rows import ContextWeights, DraftRows
from kdecode.decode.draft_standard import (
    Choose,
    ContextRows,
    DraftBlock,
    DraftRequest,
    first_choices,
)
from kdecode.decode.draft_use import (
    CONTEXT_ROWS,
    Row,
    RowWriter,
    check_drafts,
    check_tokens,
    context_passes,
    draft_caches,
    draft_deployment,
)
from kdecode.decode.graph import GraphPool, capture, made_up_inputs
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.contract import PlanMemory
from kdecode.model.draft_tiles import DraftPlanWeights
from kdecode.model.layout import PackedModel

_T = TypeVar("_T", int, float)


class CudaDraft:
    """A `DraftForward`. Blocks have ``num_drafts`` rows a request; deployment: the target's.

    pool: of the graphs; None for launches one by one. The caches have to be free while graphs are
    recorded. stack: the draft's layers as a model; caches: its rows as pages; num_steps: of a plan
    up to its logits.
    """

    def __init__(
        self,
        weights: DraftPlanWeights,
        config: DraftConfig,
        target: PackedModel,
        caches: Caches,
        deployment: Deployment,
        num_drafts: int,
        pool: GraphPool | None,
    ) -> None:
        self.config = config
        self.num_drafts = num_drafts
        self.stack = weights.model(target)
        own, rows = draft_deployment(config, deployment, num_drafts), draft_caches(caches)
        self.caches = rows
        self._device = own.place
        self._rows = RowWriter(config, own, rows)
        self._prompts = DraftRows(config, ContextWeights.of_plan(weights), caches, own.place)
        memory = PlanMemory(own.place)
        self._most = min(caches.num_slots, draft_cuda.most_requests(num_drafts))
        # Most rows first: the others use the beginning of its memory.
        self._plans = {
            count: draft_cuda.build(own, weights, target, rows, count, num_drafts, memory)
            for count in range(self._most, 0, -1)
        }
        self._contexts = {
            count: draft_cuda.build_context(own, weights, rows, count, memory)
            for count in CONTEXT_ROWS
        }
        plan = self._plans[1]
        # The choices are behind them, in a plan of any number of requests.
        self.num_steps = len(plan.steps) - draft_cuda.num_choices(plan)
        self._has_confidence = "draft_confidence" in plan.buffers
        if pool is not None:
            self._record(pool)

    def append(self, parts: Sequence[ContextRows]) -> None:
        """Caches the rows of committed tokens, in every layer."""
        # A pass of more rows than any prepared one reads the weights once, whatever their number.
        prompts = [part for part in parts if part.taps.shape[0] > CONTEXT_ROWS[0]]
        others = [part for part in parts if part.taps.shape[0] <= CONTEXT_ROWS[0]]
        with on_device(self._device):
            if prompts:
                positions, places = self._rows.places(prompts)
                taps = torch.cat([part.taps for part in prompts])
                self._prompts.append(taps, positions, places)
            for program in self.load_passes(others):
                program.run()

    def block(
        self, requests: Sequence[DraftRequest], num_drafts: int, choose: Choose
    ) -> DraftBlock:
        """Drafts of each request for the tokens behind its anchor, strictly left to right."""
        check_drafts(num_drafts, self.num_drafts)
        check_tokens([request.anchor for request in requests], self.config.vocab_size)
        groups = self._groups(requests)
        order = [place for group in groups for place in group]
        shared = [[requests[place] for place in group] for group in groups]
        with on_device(self._device):
            if choose is first_choices:
                found = [self._first_choices(group) for group in shared]
            else:
                found = self._chosen(shared, order, choose)
            # The one wait of a greedy round.
            tokens = torch.cat([part.tokens for part in found]).tolist()
            parts = [part.confidence for part in found if part.confidence is not None]
            expected = torch.cat(parts).tolist() if parts else None
        return DraftBlock(
            _in_place(tokens, order), None if expected is None else _in_place(expected, order)
        )

    def load_passes(self, parts: Sequence[ContextRows]) -> Iterator[ContextProgram]:
        """The programs of passes over committed tokens, each with its inputs, before it runs."""
        if not parts:
            return
        for rows, taps in context_passes(parts):
            program = self._contexts[len(rows)]
            staging = program.buffers.staging
            self._rows.write(staging.arrays(), rows)
            staging.send()
            program.buffers["taps"].copy_(taps)
            yield program

    def _groups(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Places of the requests that share a run; one that needs the spare pages has its own."""
        together, alone = list[int](), list[list[int]]()
        for place, request in enumerate(requests):
            if self._rows.fits(request.num_tokens, self.num_drafts, request.pages):
                together.append(place)
            else:
                alone.append([place])
        firsts = range(0, len(together), self._most)
        return [*(together[first : first + self._most] for first in firsts), *alone]

    def load(self, requests: Sequence[DraftRequest]) -> DecodePlan:
        """The plan of these requests, of which there is one, with its inputs."""
        plan, count = self._plans[len(requests)], self.num_drafts
        staging = plan.buffers.staging
        arrays = staging.arrays()
        rows = []
        for request in requests:
            pages = (*request.pages, *self._rows.spare_pages)
            rows += [Row(request.num_tokens + place, pages) for place in range(count)]
        self._rows.write(arrays, rows)
        anchors = [request.anchor for request in requests]
        arrays["row_token"].fill(self.config.mask_id)
        arrays["row_token"][::count] = anchors
        arrays["row_slot"].fill(0)
        arrays["draft_tokens"].fill(0)
        arrays["draft_tokens"][0] = anchors
        staging.send()
        return plan

    def _first_choices(self, requests: Sequence[DraftRequest]) -> _Found:
        """Greedy drafts; nothing here waits for the device."""
        plan = self.load(requests)
        plan.run()
        return self._found(plan)

    def _found(self, plan: DecodePlan) -> _Found:
        """What a run has left, in memory of its own: the next run has the plan's."""
        confidence = None
        if self._has_confidence:
            confidence = plan.buffers["draft_confidence"].view(-1, self.num_drafts).clone()
        return _Found(plan.buffers["draft_tokens"][1:].T.clone(), confidence)

    def _chosen(
        self, groups: Sequence[Sequence[DraftRequest]], order: Sequence[int], choose: Choose
    ) -> list[_Found]:
        """Drafts that the host chooses, of all requests at a time. order: their places."""
        begun = []
        for group in groups:
            plan = self.load(group)
            plan.run_range(0, self.num_steps)
            begun.append(_Begun.of(plan, [r.anchor for r in group], is_only=len(groups) == 1))
        for place in range(self.num_drafts):
            parts = []
            for one in begun:
                one.resume()
                step = self.num_steps + place
                one.plan.run_range(step, step + 1)
                parts.append(one.plan.buffers["draft_logits"].clone())
            logits = dict(zip(order, torch.cat(parts), strict=True))
            tokens = choose(place, torch.stack([logits[row] for row in range(len(order))]))
            check_tokens(tokens, self.config.vocab_size)
            chosen = iter(order)
            for one in begun:
                one.tokens.append([tokens[next(chosen)] for _ in one.tokens[0]])
        found = []
        for one in begun:
            one.resume()
            one.plan.run_range(self.num_steps + self.num_drafts, len(one.plan.steps))
            found.append(self._found(one.plan))
        return found

    def _record(self, pool: GraphPool) -> None:
        """Graphs of greedy rounds, of the pieces of others, and of what caches committed tokens."""
        for count, plan in self._plans.items():
            behind = range(self.num_steps, len(plan.steps))
            ranges = [(0, self.num_steps), *((step, step + 1) for step in behind)]
            self._plans[count] = capture(plan, pool, ranges)
        for count, program in self._contexts.items():
            self._contexts[count] = _recorded(program, pool)


class _Found(NamedTuple):
    """tokens [B, N] and, where there is a confidence head, what it expects of them [B, N]."""

    tokens: Tensor
    confidence: Tensor | None


class _Begun(NamedTuple):
    """A block that has run, whose drafts are chosen. tokens: the anchors, then a list a draft.

    kept: of the plan's buffers by name, where another block has run in the same memory since.
    """

    plan: DecodePlan
    tokens: list[list[int]]
    kept: dict[str, Tensor]

    @staticmethod
    def of(plan: DecodePlan, anchors: list[int], *, is_only: bool) -> _Begun:
        names = () if is_only else ("logits", "head_in")
        return _Begun(plan, [anchors], {name: plan.buffers[name].clone() for name in names})

    def resume(self) -> None:
        """Everything that the next choice reads is where the plan has it."""
        for name, tensor in self.kept.items():
            self.plan.buffers[name].copy_(tensor)
        staging = self.plan.buffers.staging
        staging.arrays()["draft_tokens"][: len(self.tokens)] = self.tokens
        staging.send()


def _in_place(rows: list[list[_T]], order: Sequence[int]) -> list[tuple[_T, ...]]:
    """Rows in the order of their requests. order: which request each row is of."""
    by_place = dict(zip(order, rows, strict=True))
    return [tuple(by_place[place]) for place in range(len(order))]


def _recorded(program: ContextProgram, pool: GraphPool) -> ContextProgram:
    made_up_inputs(program.buffers.staging, 1)
    pool.warm_up(program.run)
    return replace(program, run=pool.record(program.run).replay)
