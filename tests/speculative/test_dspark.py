"""DSpark's proposals over a made-up draft: what is cached, and how drafts are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.config_speculative import SpeculativeConfig
from kdecode.decode.draft_standard import Choose, ContextRows, DraftBlock, DraftRequest
from kdecode.speculative.dspark import DsparkProposer
from kdecode.speculative.types import Proposal, RoundRequest

VOCAB = 5


@dataclass
class FakeDraft:
    """Logits are a function of the request's last token and of the place."""

    appended: list[ContextRows] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def append(self, parts: Sequence[ContextRows]) -> None:
        self.appended += parts

    def block(
        self, requests: Sequence[DraftRequest], num_drafts: int, choose: Choose
    ) -> DraftBlock:
        self.blocks.append(num_drafts)
        previous = [request.anchor for request in requests]
        chosen = []
        for place in range(num_drafts):
            previous = list(choose(place, torch.stack([logits_of(place, t) for t in previous])))
            chosen.append(previous)
        tokens = [tuple(row) for row in zip(*chosen, strict=True)]
        return DraftBlock(tokens, [(0.5,) * num_drafts for _ in requests])


def logits_of(place: int, previous: int) -> Tensor:
    return torch.tensor([float((place + 2 * previous + token) % VOCAB) for token in range(VOCAB)])


def _proposer(method: str = "greedy") -> tuple[DsparkProposer, FakeDraft]:
    config = SpeculativeConfig("draft", 3, draft_sample_method=method)  # type: ignore[arg-type]
    draft = FakeDraft()
    return DsparkProposer(config, draft), draft


def _step(*parts: tuple[int, int, int]) -> StepBatch:
    """Requests of (slot, start, tokens)."""
    return StepBatch(
        tuple(
            StepRequest(tuple(range(count)), start, slot, (slot,), is_decode=start > 0)
            for slot, start, count in parts
        )
    )


def _taps(rows: int) -> Tensor:
    return torch.arange(rows).float().view(-1, 1, 1)


def test_kept_rows_alone_are_cached() -> None:
    proposer, draft = _proposer()
    proposer.observe(_step((0, 0, 4), (2, 0, 2)), [4, 2], _taps(6))
    proposer.observe(_step((2, 2, 3), (0, 4, 4)), [1, 3], _taps(7))
    found = [(part.start, part.pages, part.taps.flatten().tolist()) for part in draft.appended]
    assert found == [
        (0, (0,), [0, 1, 2, 3]),
        (0, (2,), [4, 5]),
        (2, (2,), [0]),
        (4, (0,), [3, 4, 5]),
    ]


def test_a_slot_of_another_length_is_an_error() -> None:
    proposer, _ = _proposer()
    proposer.observe(_step((0, 0, 4)), [4], _taps(4))
    with pytest.raises(RuntimeError, match="slot 0 has 4 rows; the step began at 5"):
        proposer.observe(_step((0, 5, 1)), [1], _taps(1))
    with pytest.raises(RuntimeError, match="slot 0 has 4 rows; the anchor is at 3"):
        proposer.propose([RoundRequest(0, 1, 3, 3, 0, (0,))])
    with pytest.raises(RuntimeError, match="no taps"):
        proposer.observe(_step((0, 4, 1)), [1], None)
    # A new request in the slot begins anew.
    proposer.observe(_step((0, 0, 2)), [2], _taps(2))
    assert proposer.propose([RoundRequest(1, 1, 2, 3, 0, (0,))])[0].num_drafts == 3


def _requests(*temperatures: float, num_drafts: int = 3) -> list[RoundRequest]:
    return [
        RoundRequest(row, row, 4, num_drafts, row, (row,), temperature, seed=7 + row)
        for row, temperature in enumerate(temperatures)
    ]


def _prepared(method: str, rows: int) -> tuple[DsparkProposer, FakeDraft]:
    proposer, draft = _proposer(method)
    proposer.observe(_step(*((slot, 0, 4) for slot in range(rows))), [4] * rows, _taps(4 * rows))
    return proposer, draft


@pytest.mark.parametrize(("method", "temperature"), [("greedy", 0.7), ("probabilistic", 0.0)])
def test_first_choices_are_taken_as_given(method: str, temperature: float) -> None:
    proposer, _ = _prepared(method, 1)
    (proposal,) = proposer.propose(_requests(temperature))
    drafts, previous = [], 0
    for place in range(3):
        previous = int(logits_of(place, previous).argmax())
        drafts.append(previous)
    assert proposal == Proposal(4, tuple(drafts), None, (0.5, 0.5, 0.5))


def test_drawn_drafts_come_with_the_distribution_they_were_drawn_from() -> None:
    proposer, _ = _prepared("probabilistic", 3)
    greedy, warm, hot = proposer.propose(_requests(0.0, 0.7, 5.0))
    assert greedy.probabilities is None
    for proposal, temperature, anchor in ((warm, 0.7, 1), (hot, 5.0, 2)):
        assert proposal.probabilities is not None
        for place, previous in enumerate((anchor, *proposal.drafts[:-1])):
            expected = torch.softmax(logits_of(place, previous).double() / temperature, dim=-1)
            assert torch.equal(proposal.probabilities[place], expected)
    again = proposer.propose(_requests(0.0, 0.7))[1]
    assert again.drafts == warm.drafts, "the draws depend on batch mates"


def test_drafts_follow_their_distribution() -> None:
    proposer, _ = _prepared("probabilistic", 1)
    counts, draws = torch.zeros(VOCAB), 4000
    for seed in range(draws):
        (proposal,) = proposer.propose([RoundRequest(0, 3, 4, 1, 0, (0,), 2.0, seed)])
        counts[proposal.drafts[0]] += 1
    expected = torch.softmax(logits_of(0, 3).double() / 2.0, dim=-1) * draws
    # 4 degrees of freedom: above 23.5 once in 10,000 times.
    assert float(((counts - expected).square() / expected).sum()) < 23.5


def test_fewer_drafts_are_the_first_ones_of_a_whole_block() -> None:
    proposer, draft = _prepared("greedy", 2)
    requests = _requests(0.0, 0.0)
    whole = proposer.propose(requests)
    fewer = proposer.propose([requests[0], _requests(0.0, 0.0, num_drafts=1)[1]])
    assert fewer[0] == whole[0]
    assert fewer[1] == whole[1].shortened(1)
    assert draft.blocks == [3, 3]
