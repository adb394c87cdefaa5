"""draft_context in Triton against the draft's reference."""

from __future__ import annotations

import pytest
import torch
from draft_cases import make_draft_case, randn

from kdecode.decode.plan import Buffer
from kdecode.kernels.draft_context.op import CONTRACT
from kdecode.model.draft_reference import context_rows
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close


@pytest.mark.parametrize("rows", [*range(1, 9), 64])
@pytest.mark.parametrize("has_tap_norms", [False, True])
def test_rows(rows: int, has_tap_norms: bool) -> None:
    case = make_draft_case(has_tap_norms=has_tap_norms)
    width, count = case.config.hidden_size, len(case.config.taps)
    buffers = case.buffers(
        Buffer("taps", (rows, count, width), torch.bfloat16),
        Buffer("context", (rows, width), torch.bfloat16),
    )
    taps = randn(rows, count, width, seed=rows)
    buffers["taps"].copy_(taps)
    case.run("draft_context", case.weights, buffers, rows)
    gold = context_rows(case.p, case.config, taps, ROUNDED)
    assert_close(buffers["context"].cpu(), gold.float(), CONTRACT.tolerance, "context")
