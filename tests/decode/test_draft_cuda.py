"""A draft's plans on CUDA against its reference: rounds that the host chooses, and greedy ones.

Without a GPU in Triton's interpreter, with graphs that run again what they were given; `tests/gpu`
has those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_cuda_cases import cuda_rounds, draft_target, small_parts, small_rounds
from draft_rounds import (
    ANCHORS,
    CONTEXTS,
    LIMIT,
    LOGITS,
    NUM_DRAFTS,
    ROW,
    Rounds,
    requests_of,
    taps_of,
)
from torch import Tensor

from kdecode.config import DecodeBackend, EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.config_speculative import SpeculativeConfig
from kdecode.decode import draft_device, draft_specialized, draft_standard, draft_use
from kdecode.decode.draft_standard import ContextRows, DraftBlock, DraftRequest, first_choices
from kdecode.decode.draft_use import RowWriter
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.decode.plan import Step
from kdecode.decode.runner import resolve
from kdecode.decode.step_check import StepError
from kdecode.engine import draft
from kdecode.model.draft_reference import DraftState, append_context
from kdecode.model.draft_synthesis import draft_document
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close, bit_equal


@dataclass
class Replayed:
    """Runs again what was recorded."""

    again: Callable[[], None]
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.again()


@dataclass
class Pool:
    """`GraphPool` without a GPU."""

    recorded: list[Replayed] = field(default_factory=list)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], None]) -> Replayed:
        self.recorded.append(Replayed(run))
        return self.recorded[-1]

    @property
    def sides(self) -> Pool:
        """The plans of a draft have one stream."""
        return self

    def launch(self, steps: Sequence[Step]) -> None:
        for step in steps:
            step.run()

    def replays(self) -> int:
        """Since the last time."""
        count = sum(graph.replays for graph in self.recorded)
        for graph in self.recorded:
            graph.replays = 0
        return count


@dataclass(frozen=True)
class Filled:
    """Rounds of up to two requests a run, with contexts; what a test writes is behind them."""

    rounds: Rounds
    pages: list[tuple[int, ...]]
    states: list[DraftState]


@pytest.fixture(scope="module", params=["latent", "grouped"])
def filled(request: pytest.FixtureRequest) -> Filled:
    rounds = small_rounds(None, num_slots=2, is_grouped=request.param == "grouped")
    filled = Filled(rounds, *rounds.fill())
    rounds.check_rows(filled.pages, filled.states)
    return filled


def test_blocks_against_the_reference(filled: Filled) -> None:
    """Of more requests than a run has, whose drafts the host chooses."""
    filled.rounds.check_block(filled.pages, filled.states)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inferact", "lightseek", "radixark", "redhat"])
def test_published_layouts_against_the_reference(
    mini_checkpoint: Path, tmp_path: Path, kind: DraftKind
) -> None:
    """With the embedding and the head of the target."""
    cuda_rounds(mini_checkpoint, tmp_path / "draft", kind, None).check()


def _seen(case: Rounds, requests: list[DraftRequest]) -> tuple[DraftBlock, list[Tensor]]:
    """A round whose first choices the host makes, and the logits of each place."""
    seen: list[Tensor] = []

    def choose(place: int, logits: Tensor) -> list[int]:
        seen.append(logits.clone())
        return first_choices(place, logits)

    return case.draft.block(requests, NUM_DRAFTS, choose), seen


def test_a_greedy_round_asks_the_host_for_nothing(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its drafts are first choices by the reference."""
    monkeypatch.setattr(draft_standard.Tensor, "argmax", None)
    block = filled.rounds.draft.block(requests_of(filled.pages), NUM_DRAFTS, first_choices)
    monkeypatch.undo()
    assert len(set(block.tokens)) == len(CONTEXTS)
    for state, anchor, tokens in zip(filled.states, ANCHORS, block.tokens, strict=True):
        gold = filled.rounds.reference(state, anchor, tokens)
        for logits, token in zip(gold.logits, tokens, strict=True):
            # As good as the largest, as far as the roundings of two layers go.
            assert float(logits.max() - logits[token]) < LOGITS.atol


def test_a_greedy_round_is_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine has it. Its drafts are those that the host chooses by a replay for each."""
    for module in (draft_device, draft_use):
        monkeypatch.setattr(module, "CONTEXT_ROWS", (8, 1))
    own, pool = small_parts(num_slots=2), Pool()
    monkeypatch.setattr(draft, "GraphPool", lambda: pool)
    monkeypatch.setattr(draft, "on_device", lambda device: nullcontext())
    engine, runner = _engine("latency_specialized", NUM_DRAFTS), SimpleNamespace()
    runner.deployment = own.deployment
    forward = draft.make_forward(
        own.case.weights, own.case.config, engine, own.target, runner, own.caches
    )
    case = own.rounds(forward)
    # Of two plans: the whole, the block, each choice and the confidence; and the passes.
    assert len(pool.recorded) == 2 * (2 + NUM_DRAFTS + 1) + 2
    pages = case.caches.allocate_pages(9 + NUM_DRAFTS), case.caches.allocate_pages(NUM_DRAFTS)
    taps = taps_of(case.config, 9, 0)
    case.draft.append([ContextRows(0, pages[0], taps[:8]), ContextRows(8, pages[0], taps[8:])])
    assert pool.replays() == 2
    requests = [DraftRequest(17, 9, pages[0]), DraftRequest(5, 0, pages[1])]
    chosen, _ = _seen(case, requests)
    assert pool.replays() == 1 + NUM_DRAFTS + 1
    greedy = case.draft.block(requests, NUM_DRAFTS, first_choices)
    assert pool.replays() == 1
    assert greedy == chosen
    assert len(set(greedy.tokens)) == 2


def test_more_requests_than_a_run_has(filled: Filled) -> None:
    """Two of one run, one of another, and one that needs nobody's pages: each as it is alone."""
    case, pages = filled.rounds, filled.pages
    own = requests_of(pages)
    full = DraftRequest(4, 8, pages[0][:2])
    requests = [own[0], full, own[1], own[2]]
    together, seen = _seen(case, requests)
    assert case.draft.block(requests, NUM_DRAFTS, first_choices) == together
    for number in (1, 2):
        alone, logits = _seen(case, [requests[number]])
        for place in range(NUM_DRAFTS):
            found, wanted = seen[place][number].cpu(), logits[place][0].cpu()
            assert_close(found, wanted, LOGITS, f"request {number}, draft {place}")
        assert alone.tokens == [together.tokens[number]]


def test_a_block_again_and_behind_all_pages(filled: Filled) -> None:
    """The block's rows are behind the request's; nothing of an earlier block is in a later one."""
    case, pages = filled.rounds, filled.pages
    free = case.caches.page_pool.num_free
    full = DraftRequest(4, 8, pages[0][:2])
    _, first = _seen(case, [full])
    _seen(case, [DraftRequest(9, CONTEXTS[2], pages[2])])
    _, again = _seen(case, [full])
    (page,) = case.caches.allocate_pages(NUM_DRAFTS)
    _, roomy = _seen(case, [DraftRequest(4, 8, (*pages[0][:2], page))])
    case.caches.free_pages((page,))
    for a, b, c in zip(first, again, roomy, strict=True):
        bit_equal(a, b, "logits of the same block")
        bit_equal(a, c, "logits on pages of its own")
        assert bool(torch.isfinite(a).all())
    assert case.caches.page_pool.num_free == free


def test_what_does_not_exist_is_refused(filled: Filled) -> None:
    case = filled.rounds
    before = {layer: pool.clone() for layer, pool in case.caches.draft.items()}
    taps = taps_of(case.config, 1, 0)
    for start, pages, message in (
        (8, (0, 1), "Position 8 of a draft's cache is not one of 2 pages of 4 tokens"),
        (LIMIT + NUM_DRAFTS, (0,) * 60, f"at most {LIMIT + NUM_DRAFTS} tokens"),
        (3, (50,), r"The pages \[50\] of a draft's cache are not all of its 50"),
    ):
        with pytest.raises(StepError, match=message):
            case.draft.append([ContextRows(start, pages, taps)])
    request = requests_of(filled.pages)[1]
    with pytest.raises(ValueError, match="5 drafts are asked for; the plan has 4 rows"):
        case.draft.block([request], 5, first_choices)
    with pytest.raises(ValueError, match="Token -1 is not of the vocabulary"):
        case.draft.block([replace(request, anchor=-1)], NUM_DRAFTS, first_choices)
    for layer, pool in case.caches.draft.items():
        bit_equal(pool, before[layer], f"layer {layer}")
    with pytest.raises(ValueError, match="Token 177 is not of the vocabulary of 177"):
        case.draft.block([request], NUM_DRAFTS, lambda place, logits: [177])


def test_a_prompt_is_cached_at_once(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tokens than a pass has, by products that read the weights once; beside a round's. The
    rows are as close to those of passes as these are to the reference's."""
    case, count = filled.rounds, 71
    taps, few = taps_of(case.config, count, 7), taps_of(case.config, 3, 8)
    pages = tuple(reversed(case.caches.allocate_pages(count)))
    own = case.caches.allocate_pages(3)
    for pool in case.caches.draft.values():
        pool[[*pages, *own]] = float("nan")
    passes: list[int] = []
    write = draft_device.RowWriter.write

    def written(self: RowWriter, arrays: Any, rows: Sequence[Any]) -> None:
        passes.append(len(rows))
        write(self, arrays, rows)

    monkeypatch.setattr(draft_device.RowWriter, "write", written)
    case.draft.append([ContextRows(0, pages, taps), ContextRows(0, own, few)])
    assert passes == [3]
    at_once = [_cached(pool, pages) for pool in case.caches.draft.values()]
    beside = [_cached(pool, own) for pool in case.caches.draft.values()]
    case.draft.append([ContextRows(0, pages, taps[:60]), ContextRows(60, pages, taps[60:])])
    assert passes == [3, 64, 7]
    for rows, given in ((at_once, taps), (beside, few)):
        gold = DraftState.new(case.config, ROUNDED)
        append_context(case.p, case.config, gold, given, ROUNDED)
        for layer, found in enumerate(rows):
            tokens = len(given)
            assert_close(found[:tokens], gold.rows[layer].float(), ROW, f"layer {layer}")
            assert bool(torch.isnan(found[tokens:]).all())
    for layer, pool in case.caches.draft.items():
        by_passes = _cached(pool, pages)[:count].float()
        assert_close(at_once[layer][:count], by_passes, ROW, f"layer {layer}, by passes")
    case.caches.free_pages((*pages, *own))


def test_a_prompt_where_there_are_no_pages_is_refused(filled: Filled) -> None:
    """With nothing written."""
    case, taps = filled.rounds, taps_of(filled.rounds.config, 65, 0)
    before = {layer: pool.clone() for layer, pool in case.caches.draft.items()}
    for start, pages, message in (
        (0, tuple(range(16)), "Position 64 of a draft's cache is not one of 16 pages of 4 tokens"),
        (-1, tuple(range(17)), "Position -1 of a draft's cache"),
        (LIMIT, (0,) * 60, f"at most {LIMIT + NUM_DRAFTS} tokens"),
        (0, (*range(16), 50), "of a draft's cache are not all of its 50"),
    ):
        with pytest.raises(StepError, match=message):
            case.draft.append([ContextRows(start, pages, taps)])
    for layer, pool in case.caches.draft.items():
        bit_equal(pool, before[layer], f"layer {layer}")


def _cached(pool: Tensor, pages: Sequence[int]) -> Tensor:
    return pool[list(pages)].flatten(0, 1).cpu()


def _engine(backend: DecodeBackend, num_drafts: int) -> EngineConfig:
    return resolve(
        EngineConfig(
            device="cuda",
            decode_backend=backend,
            max_context_tokens=1024,
            isa="portable",
            speculative=SpeculativeConfig("draft", num_drafts),
        )
    )


def _drafts() -> tuple[ModelConfig, dict[str, DraftConfig]]:
    target = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))
    kinds: tuple[DraftKind, ...] = ("inferact", "lightseek", "radixark", "redhat")
    documents = {kind: draft_document(kind, target) for kind in kinds}
    return target, {kind: DraftConfig.from_checkpoint(text) for kind, text in documents.items()}


def test_every_reason_why_a_draft_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafts = _drafts()
    where, latent, grouped = draft_target(target), drafts["inferact"], drafts["radixark"]
    halves = replace(latent, rope=replace(latent.rope, is_interleaved=False), window=100)
    reasons = draft_specialized.refuse(halves, where, 7)
    assert "latent attention rotates neighbours; this draft's pairs are halves" in reasons[0]
    assert "reads all of the context; this draft's window is 100 tokens" in reasons[1]
    neighbours = replace(grouped, rope=replace(grouped.rope, is_interleaved=True), window=100)
    (reason,) = draft_specialized.refuse(neighbours, where, 7)
    assert "grouped-query attention rotates halves; this draft's pairs are neighbours" in reason
    for config in (latent, grouped):
        (reason,) = draft_specialized.refuse(config, replace(where, arch="sm_80"), 7)
        assert "made for sm_90 (Hopper) and later" in reason
    with pytest.raises(BackendRefusedError, match="made for sm_90"):
        draft_specialized.describe(latent, replace(where, arch="sm_80"), 7)
    monkeypatch.setattr("kdecode.decode.latency_cuda.find_spec", lambda name: None)
    (reason,) = draft_specialized.refuse(latent, where, 7)
    assert "Triton is not installed here" in reason


def test_an_engine_on_cuda_gives_its_draft_plans() -> None:
    target, drafts = _drafts()
    for config in (*drafts.values(), replace(drafts["inferact"], is_causal=True)):
        assert draft.plan_refusals(_engine("latency_specialized", 7), config, target) == []
        reasons = draft.plan_refusals(_engine("auto", 7), config, target)
        assert reasons == ["decode_backend is auto."]
