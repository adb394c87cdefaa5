"""On a GPU: graphs whose launches run on several streams, against the same launches one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import Twins, build, decode_batch
from native_cases import Loaded

from kdecode.decode.graph import GraphPool, capture
from kdecode.decode.runner import load_inputs
from kdecode.decode.verify import copy_caches
from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import bit_equal

pytestmark = pytest.mark.gpu

SHARED = {"shared_experts": "stream"}
PREFETCH = {"weight_prefetch": "l2"}


@pytest.fixture(scope="module", params=["mini_checkpoint", "mini_linear_checkpoint"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    directory = Path(request.getfixturevalue(request.param))
    packed = pack_model(CheckpointReader(directory), "rows", device="cuda")
    return Loaded(packed, CheckpointReader(directory).load_model())


@pytest.mark.parametrize("settings", [SHARED, PREFETCH, {**SHARED, **PREFETCH}])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_replays_have_the_bits_of_launches_in_order(
    loaded: Loaded, rows: int, settings: dict[str, Any]
) -> None:
    """Many replays, because what is not in order need not go wrong each time."""
    twins, others = Twins.of(loaded), Twins.of(loaded)
    launched = build(loaded, others.ours, rows, **settings)
    recorded = capture(build(loaded, twins.ours, rows, **settings), GraphPool())
    batch = decode_batch([5 + row % 7 for row in range(rows)])
    for turn in range(20):
        twins.fill(batch, seed=turn)
        copy_caches(twins.theirs, others.ours)
        for plan in (launched, recorded):
            load_inputs(plan, batch)
            plan.run()
        for name in ("logits", "prefix"):
            bit_equal(recorded.buffers[name].cpu(), launched.buffers[name].cpu(), name)
        assert torch.isfinite(recorded.buffers["logits"]).all()
