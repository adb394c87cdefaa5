"""A draft's forward in torch against its reference: context, block, heads; several requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.decode.draft_standard import ContextRows, DraftRequest, StandardDraft
from kdecode.kernels.contract import Tolerance
from kdecode.model import draft_reference
from kdecode.model.draft_layout import pack_draft
from kdecode.model.draft_parameters import DraftParameters
from kdecode.model.draft_reference import DraftState, append_context
from kdecode.model.draft_synthesis import make_draft
from kdecode.model.draft_weights import load_draft
from kdecode.model.layout import pack_model
from kdecode.model.parameters import ModelParameters
from kdecode.model.reference import ROUNDED
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import assert_close
from kdecode.testing.poison import poison_

KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
PAGE_TOKENS = 4
# One rounding apart in a context row; roundings of two layers of attention in a logit.
ROW = Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=8e-3)
LOGITS = Tolerance(rtol=0.05, atol=0.25, rms_ratio=0.03)
CONTEXTS = (9, 1, 13)
ANCHORS = (17, 300, 5)
PLANNED = ((900, 3, 3, 41), (41, 42, 43, 44), (1, 2, 1000, 3))


@dataclasses.dataclass(frozen=True)
class Case:
    config: DraftConfig
    p: DraftParameters
    target: ModelParameters
    caches: Caches
    draft: StandardDraft


@pytest.fixture(scope="module")
def target(mini_checkpoint: Path) -> ModelParameters:
    return CheckpointReader(mini_checkpoint).load_model()


@pytest.fixture(params=KINDS)
def case(
    request: pytest.FixtureRequest, target: ModelParameters, mini_checkpoint: Path, tmp_path: Path
) -> Case:
    """A draft of each kind over poisoned memory; the window of one is shorter than a context."""
    make_draft(tmp_path / "draft", "mini", request.param, seed=0)
    config = DraftConfig.from_checkpoint(tmp_path / "draft")
    if config.window is not None:
        config = dataclasses.replace(config, window=5)
    p = load_draft(tmp_path / "draft", config)
    # The formats of the two backends: the target's head is the draft's where it has none.
    trunk = "tiles" if request.param in ("inferact", "redhat") else "rows"
    packed = pack_model(CheckpointReader(mini_checkpoint), trunk)
    caches = Caches.allocate(packed.config, "cpu", 1, 16, PAGE_TOKENS, draft=config)
    for pool in caches.draft.values():
        poison_(pool)
    engine = EngineConfig(page_tokens=PAGE_TOKENS)
    return Case(
        config,
        p,
        target,
        caches,
        StandardDraft(pack_draft(p, config, "cpu"), config, packed, caches, engine),
    )


def _taps(config: DraftConfig, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, len(config.taps), config.hidden_size)
    return torch.randn(shape, generator=generator).bfloat16()


def _pages(case: Case) -> list[tuple[int, ...]]:
    """Pages of each context that are not in order."""
    taken = [case.caches.allocate_pages(count) for count in CONTEXTS]
    return [tuple(reversed(pages)) for pages in taken]


def _reference(case: Case) -> list[DraftState]:
    states = []
    for seed, count in enumerate(CONTEXTS):
        state = DraftState.new(case.config, ROUNDED)
        append_context(case.p, case.config, state, _taps(case.config, count, seed), ROUNDED)
        states.append(state)
    return states


def _fill(case: Case, pages: list[tuple[int, ...]]) -> None:
    """All contexts: the first rows of each together, then the others."""
    all_taps = [_taps(case.config, count, seed) for seed, count in enumerate(CONTEXTS)]
    first = [ContextRows(0, own, taps[:6]) for own, taps in zip(pages, all_taps, strict=True)]
    case.draft.append(first)
    rest = zip(pages, all_taps, strict=True)
    case.draft.append([ContextRows(6, own, taps[6:]) for own, taps in rest if taps.shape[0] > 6])


def test_context_rows(case: Case) -> None:
    pages = _pages(case)
    _fill(case, pages)
    for own, state, count in zip(pages, _reference(case), CONTEXTS, strict=True):
        for layer, pool in case.caches.draft.items():
            rows = pool[list(own)].flatten(0, 1)
            assert_close(rows[:count], state.rows[layer].float(), ROW, f"layer {layer}")
            assert bool(torch.isnan(rows[count:]).all())


def test_blocks_of_several_requests(case: Case) -> None:
    """Logits of each place behind the planned drafts, and the confidence, are the reference's."""
    pages, states = _pages(case), _reference(case)
    _fill(case, pages)
    requests = [
        DraftRequest(anchor, count, own)
        for anchor, count, own in zip(ANCHORS, CONTEXTS, pages, strict=True)
    ]
    seen: list[Tensor] = []

    def choose(place: int, logits: Tensor) -> list[int]:
        seen.append(logits)
        return [planned[place] for planned in PLANNED]

    found = case.draft.block(requests, 4, choose)
    assert found.tokens == list(PLANNED)
    assert len(seen) == 4
    assert found.confidence is not None
    for row, (state, anchor, planned) in enumerate(zip(states, ANCHORS, PLANNED, strict=True)):
        expected = draft_reference.block(
            case.p,
            case.config,
            case.target,
            state,
            anchor,
            4,
            lambda place, logits, planned=planned: planned[place],  # type: ignore[misc]
            ROUNDED,
        )
        assert expected.confidence is not None
        for place in range(4):
            assert_close(seen[place][row], expected.logits[place], LOGITS, f"{row}, {place}")
        assert found.confidence[row] == pytest.approx(expected.confidence.tolist(), abs=0.02)
    before = [pool.clone() for pool in case.caches.draft.values()]
    case.draft.block(requests[:1], 2, lambda place, logits: [1])
    for old, pool in zip(before, case.caches.draft.values(), strict=True):
        assert torch.equal(old.view(torch.int16), pool.view(torch.int16)), "a block was cached"


def test_a_request_does_not_depend_on_its_batch_mates(case: Case) -> None:
    pages = _pages(case)
    _fill(case, pages)
    requests = [
        DraftRequest(anchor, count, own)
        for anchor, count, own in zip(ANCHORS, CONTEXTS, pages, strict=True)
    ]

    def greedy(place: int, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()

    together = case.draft.block(requests, 3, greedy)
    alone = [case.draft.block([request], 3, greedy).tokens[0] for request in requests]
    assert together.tokens == alone
