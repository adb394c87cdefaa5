"""draft_choice in Triton against the draft's reference: logits, first choices, odd logits."""

from __future__ import annotations

import pytest
import torch
from draft_cases import DraftCase, make_draft_case, randn
from torch import Tensor

from kdecode.decode.buffers import draft_buffers
from kdecode.decode.plan import Buffer
from kdecode.kernels.contract import Buffers
from kdecode.kernels.draft_choice import triton_impl
from kdecode.kernels.draft_choice.op import CONTRACT, ChoiceWeights
from kdecode.model.draft_reference import markov_bias
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close
from kdecode.testing.poison import is_poison

FP32 = torch.float32


def _run(
    case: DraftCase, base: Tensor, previous: list[int], each: int, place: int
) -> tuple[Buffers, Tensor]:
    """The buffers after a run, and its tokens [each + 1, requests]."""
    requests, vocab = len(previous), case.config.vocab_size
    rows = requests * each
    buffers = case.buffers(
        Buffer("logits", (rows, vocab), FP32),
        *draft_buffers(vocab, requests, each, has_confidence=False),
    )
    buffers["logits"].copy_(base)
    buffers["draft_tokens"][place] = torch.tensor(previous, dtype=torch.int32)
    weights = ChoiceWeights(case.weights.markov_in, case.weights.markov_out, place)
    case.run("draft_choice", weights, buffers, rows, each)
    return buffers, buffers["draft_tokens"].cpu()


@pytest.mark.parametrize(
    ("requests", "each", "place"),
    [(1, 1, 0), (1, 7, 6), (2, 3, 1), (3, 4, 0), (5, 2, 1), (8, 8, 7), (9, 7, 3), (64, 1, 0)],
)
def test_logits_and_first_choices(requests: int, each: int, place: int) -> None:
    case = make_draft_case()
    vocab = case.config.vocab_size
    base = randn(requests * each, vocab, seed=place).float()
    previous = [(31 * row + 176) % vocab for row in range(requests)]
    buffers, tokens = _run(case, base, previous, each, place)
    gold = torch.stack(
        [
            base[row * each + place] + markov_bias(case.p, token, ROUNDED)
            for row, token in enumerate(previous)
        ]
    )
    found = buffers["draft_logits"].cpu()
    assert_close(found, gold, CONTRACT.tolerance, "draft_logits")
    assert tokens[place + 1].tolist() == found.argmax(-1).tolist()
    # Nothing but the line behind the one that was read.
    others = [line for line in range(each + 1) if line not in (place, place + 1)]
    assert bool(is_poison(tokens[others]).all())


@pytest.mark.parametrize("numbers", [16, 4096])
def test_a_tie_is_the_first_and_nan_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    """Ties within a program's tokens and across programs; a row of NaN, and one of -inf.

    numbers: that the last program reads at a time, of one other program or of all.
    """
    monkeypatch.setattr(triton_impl, "_NUMBERS", numbers)
    case = make_draft_case()
    vocab, infinite = case.config.vocab_size, float("-inf")
    base = torch.full((5, vocab), infinite)
    base[0, [3, 4, 160]] = 1e6
    base[1, [150, 170]] = 1e6
    base[2] = float("nan")
    base[2, 90] = -5.0
    base[3] = float("nan")
    _, tokens = _run(case, base, [0, 1, 2, 3, 4], 1, 0)
    first, second, third, *empty = tokens[1].tolist()
    # What the token before adds is lost in so large a number.
    assert (first, second, third) == (3, 150, 90)
    assert empty == [0, 0]


def test_a_token_that_does_not_exist_becomes_no_address() -> None:
    case = make_draft_case()
    base = randn(3, case.config.vocab_size).float()
    buffers, tokens = _run(case, base, [-1, 5, 1 << 30], 1, 0)
    found = buffers["draft_logits"].cpu()
    assert torch.equal(found[0], base[0])
    assert torch.equal(found[2], base[2])
    assert tokens[1].tolist() == found.argmax(-1).tolist()


def test_two_runs_of_one_step() -> None:
    """The programs' counter is as it was."""
    case = make_draft_case()
    base = randn(2, case.config.vocab_size).float()
    first = _run(case, base, [7, 8], 1, 0)[1].tolist()
    buffers = case.buffers(
        Buffer("logits", base.shape, FP32),
        *draft_buffers(base.shape[1], 2, 1, has_confidence=False),
    )
    weights = ChoiceWeights(case.weights.markov_in, case.weights.markov_out, 0)
    step = triton_impl.prepare(case.deployment.problem(None, 2), weights, buffers)
    for _ in range(3):
        buffers["logits"].copy_(base)
        buffers["draft_tokens"].copy_(torch.tensor([[7, 8], [-1, -1]], dtype=torch.int32))
        step.run()
        assert buffers["draft_tokens"].tolist() == first


def test_refusals() -> None:
    case = make_draft_case()
    assert "7 rows are not a number" in triton_impl.refuse(case.deployment.problem(None, 7, 2))[0]
    with pytest.raises(ValueError, match="Draft 4 of a block that has 4"):
        _run(case, randn(4, case.config.vocab_size).float(), [1], 4, 4)
