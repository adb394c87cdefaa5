"""The hops that sums of parts take, in a decode step of Kimi K3."""

from __future__ import annotations

import pytest
from released import kimi_k3

from kdecode.config import ModelConfig
from kdecode.parallel.exchange_table import one_hop_bytes

RANKS = 16


@pytest.mark.parametrize(
    ("transport", "attention", "experts"), [("nccl", 2, 1), ("symmetric", 4, 3)]
)
def test_rows_whose_sums_take_one_hop(transport: str, attention: int, experts: int) -> None:
    """As the table says: of attention, and of the experts with the shared experts."""
    config = ModelConfig.from_checkpoint(kimi_k3())
    assert config.moe is not None
    assert config.moe.latent_width is not None
    width, latent = config.hidden_size, config.moe.latent_width
    assert (4 * width, 4 * (latent + width)) == (28 << 10, 42 << 10)
    most = one_hop_bytes(transport) // (4 * RANKS)
    assert (most // width, most // (latent + width)) == (attention, experts)
