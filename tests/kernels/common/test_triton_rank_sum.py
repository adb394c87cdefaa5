"""What ranks have given is added as torch adds it one by one: the same bits."""

from __future__ import annotations

import pytest
import torch
from rank_follow import part_of
from triton_cases import DEVICE

from kdecode.kernels.common.triton_rank_sum import sum_launch
from kdecode.testing.compare import bit_equal


@pytest.mark.parametrize(("size", "numbers"), [(2, 1), (3, 1024), (16, 2050)])
def test_sums_have_the_bits_of_sums_one_by_one(size: int, numbers: int) -> None:
    parts = torch.stack([part_of(rank, 1, numbers)[0] for rank in range(size)])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    out = torch.full((numbers,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    sum_launch(parts.to(DEVICE), out).run()
    bit_equal(out.cpu(), total.to(torch.bfloat16), "the sum")


def test_parts_that_are_no_parts_are_refused() -> None:
    out = torch.empty(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"the ranks' parts is torch\.bfloat16"):
        sum_launch(torch.zeros(2, 4, dtype=torch.bfloat16), out)
    with pytest.raises(ValueError, match="at least one program"):
        sum_launch(torch.zeros(2, 0), out[:0])
