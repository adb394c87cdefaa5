"""Blocks of a draft with grouped-query attention: its two Triton steps, and what they have to give.

Requests have contexts in pages out of order; what is not theirs, and what they do not see, is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from draft_cases import NUM_PAGES, PAGE_TOKENS, DraftCase, make_draft_case, randn
from torch import Tensor
from triton_cases import DEVICE

from kdecode.config import GqaConfig
from kdecode.decode.buffers import input_buffers, turn_buffers, value_buffers
from kdecode.kernels.contract import Buffers
from kdecode.model.draft_reference import rotate
from kdecode.model.reference import ROUNDED, rms_norm
from kdecode.testing.poison import poisoned

LAYER = 1


@dataclass
class GroupedBlock:
    """Blocks of ``each`` rows behind ``contexts``; changes: of the draft's configuration.

    stored: the committed rows of each request; before its window NaN.
    """

    contexts: list[int]
    each: int
    changes: dict[str, Any]
    page_tokens: int = PAGE_TOKENS
    case: DraftCase = field(init=False)
    gqa: GqaConfig = field(init=False)
    positions: Tensor = field(init=False)
    proj: Tensor = field(init=False)
    pages: Tensor = field(init=False)
    table: Tensor = field(init=False)
    stored: list[Tensor] = field(init=False)
    buffers: Buffers = field(init=False)

    def __post_init__(self) -> None:
        case = make_draft_case(is_grouped=True, **self.changes)
        deployment = replace(case.deployment, page_tokens=self.page_tokens)
        self.case = replace(case, deployment=deployment)
        attention = self.case.config.attention
        assert isinstance(attention, GqaConfig)
        self.gqa = attention
        config, rows = self.case.deployment.config, len(self.contexts) * self.each
        max_pages = self.case.deployment.max_pages
        self.buffers = self.case.buffers(
            *input_buffers(rows, max_pages),
            *turn_buffers(config, rows, 1.0),
            *value_buffers(config, rows),
        )
        starts = [start + place for start in self.contexts for place in range(self.each)]
        self.positions = torch.tensor(starts)
        self.proj = randn(rows, self.buffers["gqa_proj"].shape[1], seed=rows)
        self._store(max_pages)
        self.buffers.caches.pages[LAYER] = self.pages.to(DEVICE)
        inputs = {
            "row_position": self.positions.int(),
            "row_pages": self.table.repeat_interleave(self.each, dim=0),
            "row_rotation": self.case.rotation(self.positions),
            "gqa_proj": self.proj,
        }
        for name, tensor in inputs.items():
            self.buffers[name].copy_(tensor)

    def _store(self, max_pages: int) -> None:
        width, window = self.gqa.cache_width, self.case.config.window
        self.pages = poisoned((NUM_PAGES, self.page_tokens, width), torch.bfloat16)
        order = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3)).tolist())
        self.table = torch.full((len(self.contexts), max_pages), -1, dtype=torch.int32)
        self.stored = []
        for number, context in enumerate(self.contexts):
            used = -(-(context + self.each) // self.page_tokens)
            self.table[number, :used] = torch.tensor([next(order) for _ in range(used)])
            rows = randn(context, width, seed=number)
            if window is not None:
                rows[: max(0, context - window)] = float("nan")
            self.stored.append(rows)
            for position in range(context):
                page = self.table[number, position // self.page_tokens]
                self.pages[page, position % self.page_tokens] = rows[position]

    def run(self, *ops: str) -> None:
        weights = self.case.weights.layers[LAYER]
        for op in ops:
            self.case.run(op, weights, self.buffers, len(self.positions), self.each, LAYER)

    def heads(self) -> tuple[Tensor, Tensor]:
        """Queries [R, H, K] and cache rows [R, width] of the block, by the draft's reference."""
        gqa, dim = self.gqa, self.gqa.head_dim
        config, p = self.case.config, self.case.p.layers[LAYER].attention
        widths = [gqa.num_heads * dim, gqa.num_kv_heads * dim, gqa.num_kv_heads * dim]
        query, key, value = torch.split(self.proj, widths, dim=-1)

        def turned(x: Tensor, norm: Tensor) -> Tensor:
            normed = rms_norm(x.view(len(x), -1, dim), norm, config.rms_eps, ROUNDED)
            return rotate(config.rope, normed, self.positions, ROUNDED)

        keys = turned(key, p.k_norm).flatten(1)
        return turned(query, p.q_norm), torch.cat([keys, value], dim=-1)

    def read(self) -> Tensor:
        """What the rows read of what they see, [R, H * K], by loops over rows and heads."""
        gqa, config = self.gqa, self.case.config
        queries, rows = self.heads()
        shared = gqa.num_heads // gqa.num_kv_heads
        scale = gqa.head_dim**-0.5 * config.rope.score_scale
        found = []
        for row in range(len(self.positions)):
            request, place = divmod(row, self.each)
            stored = self.stored[request]
            first = 0 if config.window is None else max(0, len(stored) - config.window)
            block = rows[request * self.each : (request + 1) * self.each]
            seen = block[: place + 1] if config.is_causal else block
            every = torch.cat([stored[first:], seen]).float()
            keys, values = every.view(-1, 2, gqa.num_kv_heads, gqa.head_dim).unbind(1)
            for head in range(gqa.num_heads):
                own = head // shared
                scores = keys[:, own] @ queries[row, head].float() * scale
                found.append(scores.softmax(0) @ values[:, own])
        return torch.stack(found).bfloat16().view(len(self.positions), -1)

    def inserted(self) -> Tensor:
        """The cache rows that the block has written."""
        pages, found = self.buffers.caches.pages[LAYER].cpu(), []
        for row, position in enumerate(self.positions.tolist()):
            page = self.table[row // self.each, position // self.page_tokens]
            found.append(pages[page, position % self.page_tokens])
        return torch.stack(found)
