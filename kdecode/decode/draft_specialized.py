"""A draft's forward on the native kernels: what `latency_specialized` is to the target.

A round is one native call over the block (the draft's stack is a small latent-attention model with
rotation, so it is a plan of the target's own ops) and one for each draft's Markov product, because
that needs the token before it. Committed tokens are cached by another program, in passes of
prepared numbers of rows. Owns these programs and their inputs. The maths and the rounding points
are `model/draft_reference.py`'s. Does not know how drafts are chosen from logits.

The rows of a block are written behind the request's own, where committed ones overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.cache.mirror import tell_nobody
from kdecode.cache.open_rows import OpenRows
from kdecode.config_draft import DraftConfig
from kdecode.decode import latency_specialized
from kdecode.decode.draft_standard import Choose, ContextRows, DraftBlock, DraftRequest
from kdecode.decode.latency_specialized import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.step_check import StepError
from kdecode.kernels import table
from kdecode.kernels.common.native import MAX_ROWS, NativeStep, Program
from kdecode.kernels.contract import Buffers
from kdecode.model.draft_reference import frequencies
from kdecode.model.draft_tiles import (
    DraftPlanWeights,
    outline_draft_plan,
    plan_config,
    refuse_layout,
)
from kdecode.model.layout import PackedMla, PackedModel
from kdecode.parallel.context import WHOLE
from kdecode.parallel.ranks import ALONE

# Rows of one pass over committed tokens: those of a round, and many for prompts.
CONTEXT_ROWS = (MAX_ROWS, 32, 16, *range(9, 0, -1))
# Requests of one Markov product.
MARKOV_ROWS = 8


def refuse(config: DraftConfig, target: Deployment, num_drafts: int) -> list[str]:
    """Every reason why the draft of a target's deployment has no native plan; [] if it has."""
    reasons = refuse_layout(config)
    if reasons:
        return reasons
    deployment = draft_deployment(config, target, num_drafts)
    reasons = latency_specialized.refuse(deployment)
    for op in ("draft_context", "draft_insert", "markov"):
        problem = deployment.problem(0, MARKOV_ROWS)
        reasons += table.implementation(op, "cpu").refuse(problem)
    return list(dict.fromkeys(reasons))


def draft_deployment(config: DraftConfig, target: Deployment, num_drafts: int) -> Deployment:
    """Where the draft's plans run: with the target, on bf16 rows, with room for the block."""
    return replace(
        target,
        config=plan_config(config),
        cache_dtype="bf16",
        max_context_tokens=target.max_context_tokens + num_drafts,
        rotation_scale=config.rope.score_scale,
        # Rank 0 has all of it.
        ranks=ALONE,
        shared=None,
        context=WHOLE,
    )


def describe(config: DraftConfig, target: Deployment, num_drafts: int) -> DecodePlan:
    """The block's plan without what it runs on. Raises BackendRefusedError with every reason."""
    reasons = refuse(config, target, num_drafts)
    if reasons:
        raise latency_specialized.BackendRefusedError(reasons)
    deployment = draft_deployment(config, target, num_drafts)
    packed = outline_draft_plan(config)
    plan = latency_specialized.describe(deployment, packed, num_drafts, num_drafts)
    notes = (
        "a native call of markov for each draft, left to right",
        f"committed tokens: draft_context and draft_insert of {config.num_layers} layers in one "
        f"native call, at most {CONTEXT_ROWS[0]} rows",
    )
    return replace(plan, notes=notes)


class SpecializedDraft:
    """A `DraftForward`. Blocks have ``num_drafts`` rows; deployment: the target's.

    A call leaves torch with one thread: the native pool has the cores.
    """

    def __init__(
        self,
        weights: DraftPlanWeights,
        config: DraftConfig,
        target: PackedModel,
        caches: Caches,
        deployment: Deployment,
        num_drafts: int,
    ) -> None:
        self.config = config
        self._weights = weights
        self.num_drafts = num_drafts
        self._deployment = draft_deployment(config, deployment, num_drafts)
        self._caches = replace(
            caches,
            cache_dtype="bf16",
            conv={},
            recurrent={},
            pages=caches.draft,
            scales=dict.fromkeys(caches.draft, 1.0),
            draft={},
            open_rows=OpenRows(),
            tell=tell_nobody,
            context=WHOLE,
        )
        self._frequencies = frequencies(config.rope).numpy()
        self.plan = latency_specialized.build(
            self._deployment, weights.model(target), self._caches, num_drafts, num_drafts
        )
        self._contexts = {rows: self._build_context(rows) for rows in CONTEXT_ROWS}
        self._markovs = {rows: self._build_markov(rows) for rows in range(1, MARKOV_ROWS + 1)}

    @property
    def markov_bytes(self) -> int:
        """Weights that one Markov product reads."""
        return self._weights.markov_out.num_bytes

    @property
    def append_bytes(self) -> int:
        """Weights that one pass over committed tokens reads."""
        mla, total = self.plan.config.mla, self._weights.context_proj.num_bytes
        for layer in self._weights.layers:
            assert isinstance(layer.attention, PackedMla)
            matrix = layer.attention.in_proj
            total += matrix.num_bytes * mla.cache_width // matrix.rows
        return total

    def append(self, parts: Sequence[ContextRows]) -> None:
        """Caches the rows of committed tokens, in every layer."""
        torch.set_num_threads(1)
        taps = torch.cat([part.taps for part in parts])
        rows = [
            _Row(part.start + place, part.pages)
            for part in parts
            for place in range(part.taps.shape[0])
        ]
        first = 0
        while first < len(rows):
            count = next(size for size in CONTEXT_ROWS if size <= len(rows) - first)
            program = self._contexts[count]
            self._load_rows(program.buffers, rows[first : first + count])
            program.buffers["taps"].copy_(taps[first : first + count])
            program.run()
            first += count

    def block(
        self, requests: Sequence[DraftRequest], num_drafts: int, choose: Choose
    ) -> DraftBlock:
        """Drafts of each request for the tokens behind its anchor, strictly left to right."""
        if num_drafts != self.num_drafts:
            raise ValueError(
                f"{num_drafts} drafts are asked for; the plan has {self.num_drafts} rows."
            )
        torch.set_num_threads(1)
        found = [self._run_block(request) for request in requests]
        before = [[request.anchor for request in requests]]
        for place in range(num_drafts):
            base = torch.stack([logits[place] for logits, _ in found])  # [B, vocab]
            before.append(list(choose(place, base.add_(self._markov(before[-1])))))
        tokens = [tuple(drafts) for drafts in zip(*before[1:], strict=True)]
        if self._weights.confidence is None:
            return DraftBlock(tokens, None)
        previous = torch.tensor(before[:-1]).T  # [B, N]
        rows = self._expected(torch.stack([rows for _, rows in found]), previous).tolist()
        return DraftBlock(tokens, [tuple(row) for row in rows])

    def _run_block(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Logits [N, vocab] and hidden rows [N, M] of one request's block."""
        buffers, count = self.plan.buffers, self.num_drafts
        start, pages = request.num_tokens, (*request.pages, *self._spare_pages())
        self._load_rows(buffers, [_Row(start + place, pages) for place in range(count)])
        buffers["row_context"].fill_(start + count)
        buffers["row_token"].fill_(self.config.mask_id)
        buffers["row_token"][0] = request.anchor
        self.plan.run()
        return buffers["logits"].clone(), buffers["head_in"].clone()

    def _spare_pages(self) -> range:
        """Where the rows of a block go that lie behind all of a request's pages."""
        return range(self._caches.num_pages, next(iter(self._caches.pages.values())).shape[0])

    def _load_rows(self, buffers: Buffers, rows: Sequence[_Row]) -> None:
        tokens, limit = self._deployment.page_tokens, self._deployment.max_context_tokens
        num_pages = next(iter(self._caches.pages.values())).shape[0]
        for row in rows:
            row.check(tokens, limit, num_pages)
        positions = np.array([row.position for row in rows])
        buffers["row_position"].numpy()[:] = positions
        angles = positions[:, None] * self._frequencies
        turned = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        buffers["row_rotation"].numpy()[:] = turned * self.config.rope.amplitude
        listed = buffers["row_pages"].numpy()
        listed.fill(-1)
        last = int(positions.max()) // tokens + 1
        for number, row in enumerate(rows):
            used = row.pages[:last]
            listed[number, : len(used)] = used

    def _markov(self, previous: Sequence[int]) -> Tensor:
        """What each token before adds to the logits, [B, vocab]."""
        parts = []
        for first in range(0, len(previous), MARKOV_ROWS):
            own = previous[first : first + MARKOV_ROWS]
            program = self._markovs[len(own)]
            _check_tokens(own, self.config.vocab_size)
            program.buffers["row_previous"].numpy()[:] = own
            program.run()
            # A copy: the next requests get theirs in the same buffer.
            parts.append(program.buffers["markov_bias"].clone())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expected(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The confidence head: [B, N, M], tokens before each draft [B, N] -> [B, N]."""
        assert self._weights.confidence is not None
        weight, bias = self._weights.confidence
        markov = self._weights.markov_in[previous]
        return torch.sigmoid(torch.cat([hidden, markov], dim=-1).float() @ weight + bias)

    def _build_context(self, rows: int) -> _NativeProgram:
        config, deployment = self._deployment.config, self._deployment
        buffers = self._buffers()
        taps = (rows, len(self.config.taps), config.hidden_size)
        buffers["taps"] = torch.zeros(taps, dtype=torch.bfloat16)
        buffers["context"] = torch.zeros(rows, config.hidden_size, dtype=torch.bfloat16)
        buffers["row_position"] = torch.zeros(rows, dtype=torch.int32)
        buffers["row_rotation"] = torch.zeros(rows, config.mla.rope_dim)
        buffers["row_pages"] = torch.zeros(rows, deployment.max_pages, dtype=torch.int32)
        ops: list[tuple[str, int | None, Any]] = [("draft_context", None, self._weights)]
        for layer, weights in enumerate(self._weights.layers):
            ops.append(("draft_insert", layer, weights))
        return _NativeProgram.of(deployment, buffers, rows, ops)

    def _build_markov(self, rows: int) -> _NativeProgram:
        buffers = self._buffers()
        buffers["row_previous"] = torch.zeros(rows, dtype=torch.int32)
        buffers["markov_bias"] = torch.zeros(rows, self.config.vocab_size)
        ops = [("markov", None, self._weights)]
        return _NativeProgram.of(self._deployment, buffers, rows, ops)

    def _buffers(self) -> Buffers:
        buffers = Buffers()
        buffers.caches, buffers.pool = self._caches, self._deployment.pool
        return buffers


@dataclass(frozen=True)
class _Row:
    """A cache row's position and the pages of its request."""

    position: int
    pages: Sequence[int]

    def check(self, page_tokens: int, max_context_tokens: int, num_pages: int) -> None:
        """Raises StepError for a place that does not exist: native code follows it unseen."""
        if not 0 <= self.position < min(max_context_tokens, len(self.pages) * page_tokens):
            raise StepError(
                f"Position {self.position} of a draft's cache is not one of {len(self.pages)} "
                f"pages of {page_tokens} tokens, and of at most {max_context_tokens} tokens."
            )
        used = self.pages[: self.position // page_tokens + 1]
        if min(used) < 0 or max(used) >= num_pages:
            raise StepError(
                f"The pages {list(used)} of a draft's cache are not all of its {num_pages}."
            )


@dataclass(frozen=True)
class _NativeProgram:
    """Ops in one native call, and their buffers."""

    buffers: Buffers
    steps: tuple[NativeStep, ...]
    program: Program

    @staticmethod
    def of(
        deployment: Deployment,
        buffers: Buffers,
        rows: int,
        ops: Sequence[tuple[str, int | None, Any]],
    ) -> _NativeProgram:
        program = Program(deployment.pool, deployment.isa)
        steps = []
        for op, layer, weights in ops:
            problem = deployment.problem(layer, rows)
            step = table.implementation(op, "cpu").prepare(problem, weights, buffers)
            assert isinstance(step, NativeStep)
            program.add(step.name, step.args)
            steps.append(step)
        return _NativeProgram(buffers, tuple(steps), program)

    def run(self) -> None:
        self.program.run(0, len(self.steps))


def _check_tokens(tokens: Sequence[int], vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"Token {token} is not of the vocabulary of {vocab}.")
