"""A draft's native plan against its reference, and against the form in torch; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draft_rounds import CONTEXTS, LIMIT, NUM_DRAFTS, PAGE_TOKENS, Rounds, taps_of
from native_cases import Loaded
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.decode import draft_specialized
from kdecode.decode.draft_specialized import SpecializedDraft
from kdecode.decode.draft_standard import ContextRows, DraftRequest
from kdecode.decode.latency_specialized import BackendRefusedError, Deployment
from kdecode.decode.runner import deployment_of, resolve
from kdecode.decode.step_check import StepError
from kdecode.kernels.common.native import supported_isas
from kdecode.model.draft_synthesis import make_draft
from kdecode.model.draft_tiles import pack_draft_plan
from kdecode.model.draft_weights import load_draft
from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import bit_equal
from kdecode.testing.poison import poison_


def _deployment(packed_config: object, isa: str | None = None) -> Deployment:
    engine = EngineConfig(
        decode_backend="latency_specialized",
        page_tokens=PAGE_TOKENS,
        max_context_tokens=LIMIT,
        num_threads=1,
        isa=isa,
    )
    return deployment_of(packed_config, resolve(engine))


@pytest.fixture
def make(mini_checkpoint: Path, tmp_path: Path) -> Callable[..., Rounds]:
    def build(kind: DraftKind, isa: str | None = None, trunk: str = "tiles") -> Rounds:
        make_draft(tmp_path / "draft", "mini", kind, seed=0)
        config = DraftConfig.from_checkpoint(tmp_path / "draft")
        p = load_draft(tmp_path / "draft", config)
        reader = CheckpointReader(mini_checkpoint)
        packed = pack_model(reader, trunk)
        caches = Caches.allocate(packed.config, "cpu", 1, 48, PAGE_TOKENS, draft=config)
        for pool in caches.draft.values():
            poison_(pool)
        weights = pack_draft_plan(p, config, trunk, None)
        deployment = _deployment(packed.config, isa)
        assert draft_specialized.refuse(config, deployment, NUM_DRAFTS) == []
        draft = SpecializedDraft(weights, config, packed, caches, deployment, NUM_DRAFTS)
        target = CheckpointReader(mini_checkpoint).load_model()
        return Rounds(config, p, target, caches, draft)

    return build


@pytest.mark.parametrize("kind", ["inferact", "lightseek"])
def test_rows_and_blocks_against_the_reference(
    make: Callable[..., Rounds], kind: DraftKind
) -> None:
    make(kind).check()


@pytest.mark.parametrize("isa", supported_isas()[1:])
def test_other_instruction_sets(make: Callable[..., Rounds], isa: str) -> None:
    make("inferact", isa).check()


def test_weights_in_12_bits(make: Callable[..., Rounds]) -> None:
    make("inferact", trunk="tiles12").check()


def test_a_block_again_and_behind_all_pages(make: Callable[..., Rounds]) -> None:
    """The block's rows are behind the request's; nothing of an earlier block is in a later one."""
    case = make("inferact")
    pages, _ = case.fill()
    free = case.caches.page_pool.num_free
    # Its last page is full with the 9th to the 12th token; the block begins behind it.
    full = DraftRequest(4, 8, pages[0][:2])
    first: list[Tensor] = []
    case.draft.block([full], NUM_DRAFTS, lambda place, x: first.append(x.clone()) or [3])
    other = DraftRequest(9, CONTEXTS[2], pages[2])
    case.draft.block([other], NUM_DRAFTS, lambda place, x: [int(x.argmax())])
    again: list[Tensor] = []
    case.draft.block([full], NUM_DRAFTS, lambda place, x: again.append(x.clone()) or [3])
    for a, b in zip(first, again, strict=True):
        bit_equal(a, b, "logits of the same block")
        assert bool(torch.isfinite(a).all())
    roomy: list[Tensor] = []
    case.draft.block(
        [DraftRequest(4, 8, pages[0])], NUM_DRAFTS, lambda place, x: roomy.append(x.clone()) or [3]
    )
    for a, b in zip(first, roomy, strict=True):
        bit_equal(a, b, "logits on pages of its own")
    assert case.caches.page_pool.num_free == free
    with pytest.raises(ValueError, match="5 drafts are asked for; the plan has 4 rows"):
        case.draft.block([full], 5, lambda place, x: [3])


def test_many_requests_together_are_each_alone(make: Callable[..., Rounds]) -> None:
    """More than two products' worth; a block is over before the next one of the same pages."""
    case = make("inferact")
    pages, _ = case.fill()
    requests = [DraftRequest(3 * number, CONTEXTS[0], pages[0]) for number in range(17)]
    together: list[Tensor] = []
    block = case.draft.block(
        requests, NUM_DRAFTS, lambda place, x: together.append(x.clone()) or x.argmax(-1).tolist()
    )
    assert len(set(block.tokens)) > 3
    for number in (0, 7, 8, 15, 16):
        alone: list[Tensor] = []
        own = case.draft.block(
            [requests[number]],
            NUM_DRAFTS,
            lambda place, x, alone=alone: alone.append(x.clone()) or x.argmax(-1).tolist(),
        )
        assert own.tokens == [block.tokens[number]]
        for place, logits in enumerate(alone):
            bit_equal(together[place][number], logits[0], f"request {number}, draft {place}")


@pytest.mark.parametrize(
    ("start", "pages", "message"),
    [
        (8, (0, 1), "Position 8 of a draft's cache is not one of 2 pages of 4 tokens"),
        (-1, (0, 1), "Position -1 of a draft's cache"),
        (LIMIT + NUM_DRAFTS, (0,) * 60, f"at most {LIMIT + NUM_DRAFTS} tokens"),
        (3, (-1,), r"The pages \[-1\] of a draft's cache are not all of its 50"),
        (3, (50,), r"The pages \[50\]"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(
    make: Callable[..., Rounds], start: int, pages: tuple[int, ...], message: str
) -> None:
    case = make("inferact")
    before = {layer: pool.clone() for layer, pool in case.caches.draft.items()}
    with pytest.raises(StepError, match=message):
        case.draft.append([ContextRows(start, pages, taps_of(case.config, 1, 0))])
    for layer, pool in case.caches.draft.items():
        bit_equal(pool, before[layer], f"layer {layer}")
    with pytest.raises(ValueError, match="Token -1 is not of the vocabulary"):
        case.draft.block([DraftRequest(-1, 4, (0,))], NUM_DRAFTS, lambda place, x: [3])


@pytest.mark.parametrize("kind", ["radixark", "redhat"])
def test_grouped_attention_is_refused_by_name(
    loaded: Loaded, tmp_path: Path, kind: DraftKind
) -> None:
    make_draft(tmp_path / "draft", "mini", kind, seed=0)
    config = DraftConfig.from_checkpoint(tmp_path / "draft")
    deployment = _deployment(loaded.packed.config)
    reasons = draft_specialized.refuse(config, deployment, 7)
    assert "this draft's is grouped-query attention" in reasons[0]
    assert any("causal" in reason for reason in reasons) == (kind == "redhat")
    with pytest.raises(BackendRefusedError, match="grouped-query attention"):
        draft_specialized.describe(config, deployment, 7)
