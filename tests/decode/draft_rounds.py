"""Rounds of a draft against its reference, whichever plans its forward has.

Requests with contexts over page ends, rounds and splits, in pages out of order; memory that nobody
wrote is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config_draft import DraftConfig
from kdecode.decode.draft_standard import ContextRows, DraftRequest
from kdecode.kernels.contract import Tolerance
from kdecode.model import draft_reference
from kdecode.model.draft_parameters import DraftParameters
from kdecode.model.draft_reference import DraftState, append_context
from kdecode.model.parameters import ModelParameters
from kdecode.model.reference import ROUNDED
from kdecode.speculative.dspark import DraftForward
from kdecode.testing.compare import assert_close

PAGE_TOKENS = 4
LIMIT = 160
# As of the form in torch: one rounding apart in a row, roundings of two layers in a logit.
ROW = Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=8e-3)
LOGITS = Tolerance(rtol=0.05, atol=0.25, rms_ratio=0.03)
CONTEXTS = (9, 1, 70)
ANCHORS = (17, 100, 5)
PLANNED = ((90, 3, 3, 41), (41, 42, 43, 44), (1, 2, 100, 3))
NUM_DRAFTS = 4


@dataclass(frozen=True)
class Rounds:
    """A draft's forward, and what its reference needs."""

    config: DraftConfig
    p: DraftParameters
    target: ModelParameters
    caches: Caches
    draft: DraftForward

    def fill(self) -> tuple[list[tuple[int, ...]], list[DraftState]]:
        """Fills the draft's cache, with pages that are not in order; the same by the reference."""
        pages, states = [], []
        for seed, count in enumerate(CONTEXTS):
            pages.append(tuple(reversed(self.caches.allocate_pages(count + NUM_DRAFTS))))
            state = DraftState.new(self.config, ROUNDED)
            append_context(self.p, self.config, state, taps_of(self.config, count, seed), ROUNDED)
            states.append(state)
        taps = [taps_of(self.config, count, seed) for seed, count in enumerate(CONTEXTS)]
        parts = list(zip(pages, taps, strict=True))
        self.draft.append([ContextRows(0, own, rows[:6]) for own, rows in parts])
        self.draft.append([ContextRows(6, own, r[6:]) for own, r in parts if len(r) > 6])
        return pages, states

    def check(self) -> None:
        """Cached rows, and logits and confidence behind drafts that are planned."""
        pages, states = self.fill()
        self.check_rows(pages, states)
        self.check_block(pages, states)

    def check_rows(self, pages: list[tuple[int, ...]], states: list[DraftState]) -> None:
        """Before any block has run."""
        for own, state, count in zip(pages, states, CONTEXTS, strict=True):
            for layer, pool in self.caches.draft.items():
                rows = pool[list(own)].flatten(0, 1).cpu()
                assert_close(rows[:count], state.rows[layer].float(), ROW, f"layer {layer}")
                assert bool(torch.isnan(rows[count:]).all())

    def check_block(self, pages: list[tuple[int, ...]], states: list[DraftState]) -> None:
        seen: list[Tensor] = []

        def choose(place: int, logits: Tensor) -> list[int]:
            seen.append(logits.clone())
            return [planned[place] for planned in PLANNED]

        block = self.draft.block(requests_of(pages), NUM_DRAFTS, choose)
        assert block.tokens == list(PLANNED)
        assert block.confidence is not None
        for row, (state, anchor) in enumerate(zip(states, ANCHORS, strict=True)):
            gold = self.reference(state, anchor, PLANNED[row])
            own = torch.stack([logits[row].cpu() for logits in seen])
            assert_close(own, gold.logits, LOGITS, f"request {row}")
            assert gold.confidence is not None
            found = torch.tensor(block.confidence[row])
            assert_close(found, gold.confidence, LOGITS, f"request {row}")

    def reference(
        self, state: DraftState, anchor: int, planned: tuple[int, ...]
    ) -> draft_reference.Block:
        """A block whose drafts are planned."""
        return draft_reference.block(
            self.p,
            self.config,
            self.target,
            state,
            anchor,
            NUM_DRAFTS,
            lambda place, _: planned[place],
            ROUNDED,
        )


def requests_of(pages: list[tuple[int, ...]]) -> list[DraftRequest]:
    return [
        DraftRequest(anchor, count, own)
        for anchor, count, own in zip(ANCHORS, CONTEXTS, pages, strict=True)
    ]


def taps_of(config: DraftConfig, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, len(config.taps), config.hidden_size)
    return torch.randn(shape, generator=generator).bfloat16()
