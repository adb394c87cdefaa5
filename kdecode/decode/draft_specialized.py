"""A draft's forward on the native kernels: what `latency_specialized` is to the target.

The one entrance to the plans of drafts, whatever the device: `draft_cuda` has those of a GPU. Here
a round is one native call over the block (the draft's stack is a small latent-attention model with
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

import torch
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config_draft import DraftConfig
from kdecode.decode import draft_cuda, latency_specialized
from kdecode.decode.draft_standard import Choose, ContextRows, DraftBlock, DraftRequest
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
from kdecode.decode.latency_specialized import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.kernels import table
from kdecode.kernels.common.native import NativeStep, Program
from kdecode.kernels.contract import Buffers
from kdecode.model.draft_tiles import (
    DraftPlanWeights,
    outline_draft_plan,
    outline_draft_weights,
    refuse_layout,
)
from kdecode.model.layout import PackedMla, PackedModel

# Requests of one Markov product.
MARKOV_ROWS = 8


def refuse(config: DraftConfig, target: Deployment, num_drafts: int) -> list[str]:
    """Every reason why the draft of a target's deployment has no plan; [] if it has."""
    reasons = refuse_layout(config, is_cuda=target.is_cuda)
    if reasons:
        return reasons
    deployment = draft_deployment(config, target, num_drafts)
    reasons = latency_specialized.refuse(deployment)
    if deployment.is_cuda:
        # Where there is no Triton, it is among the reasons, and nothing of it can be asked.
        reasons = reasons or draft_cuda.refuse(deployment, num_drafts)
        return list(dict.fromkeys(reasons))
    for op in ("draft_context", "draft_insert", "markov"):
        problem = deployment.problem(0, MARKOV_ROWS)
        reasons += table.implementation(op, "cpu").refuse(problem)
    return list(dict.fromkeys(reasons))


def describe(config: DraftConfig, target: Deployment, num_drafts: int) -> DecodePlan:
    """The block's plan without what it runs on. Raises BackendRefusedError with every reason."""
    reasons = refuse(config, target, num_drafts)
    if reasons:
        raise latency_specialized.BackendRefusedError(reasons)
    deployment = draft_deployment(config, target, num_drafts)
    if deployment.is_cuda:
        packed = outline_draft_plan(config, "rows")
        weights = outline_draft_weights(config, packed)
        return draft_cuda.describe(deployment, weights, packed, 1, num_drafts)
    packed = outline_draft_plan(config, "tiles")
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
        self._caches = draft_caches(caches)
        self._rows = RowWriter(config, self._deployment, self._caches)
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
        for rows, taps in context_passes(parts):
            program = self._contexts[len(rows)]
            self._load_rows(program.buffers, rows)
            program.buffers["taps"].copy_(taps)
            program.run()

    def block(
        self, requests: Sequence[DraftRequest], num_drafts: int, choose: Choose
    ) -> DraftBlock:
        """Drafts of each request for the tokens behind its anchor, strictly left to right."""
        check_drafts(num_drafts, self.num_drafts)
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
        start, pages = request.num_tokens, (*request.pages, *self._rows.spare_pages)
        self._load_rows(buffers, [Row(start + place, pages) for place in range(count)])
        buffers["row_context"].fill_(start + count)
        buffers["row_token"].fill_(self.config.mask_id)
        buffers["row_token"][0] = request.anchor
        self.plan.run()
        return buffers["logits"].clone(), buffers["head_in"].clone()

    def _load_rows(self, buffers: Buffers, rows: Sequence[Row]) -> None:
        names = ("row_position", "row_rotation", "row_pages")
        self._rows.write({name: buffers[name].numpy() for name in names}, rows)

    def _markov(self, previous: Sequence[int]) -> Tensor:
        """What each token before adds to the logits, [B, vocab]."""
        parts = []
        for first in range(0, len(previous), MARKOV_ROWS):
            own = previous[first : first + MARKOV_ROWS]
            program = self._markovs[len(own)]
            check_tokens(own, self.config.vocab_size)
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
