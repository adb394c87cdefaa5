"""The kernel behind the bandwidth probe reads every word, once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_cases import DEVICE

from kdecode.kernels.common.triton_probe import read_launch


@pytest.mark.parametrize("count", [1, 4096, 3 * 4096 * 8 + 5])
def test_every_word_is_read_once(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).int()
    launch = read_launch(words.to(DEVICE), 1)
    launch.run()
    found = np.bitwise_xor.reduce(launch.arguments["results"].cpu().numpy())
    assert found == np.bitwise_xor.reduce(words.numpy())


def test_what_it_cannot_count_is_refused() -> None:
    for words in (torch.empty(4), torch.empty(1 << 30, dtype=torch.int32, device="meta")):
        with pytest.raises(ValueError, match="fewer than 2\\^30 contiguous int32 words"):
            read_launch(words, 1)
