"""draft_confidence in Triton against the draft's reference."""

from __future__ import annotations

import pytest
import torch
from draft_cases import make_draft_case, randn

from kdecode.decode.buffers import draft_buffers
from kdecode.decode.plan import Buffer
from kdecode.kernels.draft_confidence import triton_impl
from kdecode.kernels.draft_confidence.op import CONTRACT
from kdecode.model.draft_reference import expected_acceptance
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close


@pytest.mark.parametrize(("requests", "each"), [(1, 1), (1, 7), (3, 4), (9, 7)])
def test_every_place_of_every_request(requests: int, each: int) -> None:
    case = make_draft_case()
    width, vocab, rows = case.config.hidden_size, case.config.vocab_size, requests * each
    buffers = case.buffers(
        Buffer("head_in", (rows, width), torch.bfloat16),
        *draft_buffers(vocab, requests, each, has_confidence=True),
    )
    hidden = randn(rows, width, seed=rows)
    # The line of the last draft is not read.
    tokens = torch.randint(0, vocab, (each, requests), generator=torch.Generator().manual_seed(0))
    buffers["head_in"].copy_(hidden)
    buffers["draft_tokens"][:each] = tokens.int()
    case.run("draft_confidence", case.weights, buffers, rows, each)
    gold = torch.stack(
        [
            expected_acceptance(case.p, hidden[row], int(tokens[row % each, row // each]), ROUNDED)
            for row in range(rows)
        ]
    )
    assert_close(buffers["draft_confidence"].cpu(), gold, CONTRACT.tolerance, "confidence")


def test_refusals() -> None:
    problem = make_draft_case().deployment.problem(None, 7, 2)
    assert "7 rows are not a number of requests of 2 each" in triton_impl.refuse(problem)[0]
