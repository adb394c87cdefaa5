"""CUDA plans of several ranks: their steps in turn, in this process, against one rank.

Each rank has its part of one model's weights and caches. All ranks run a step before any runs the
next one, and read each other's parts where they lie. Without a GPU the kernels run in Triton's
interpreter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from cuda_cases import CONFIGS, DEVICE, Twins, decode_batch, deployment, poison
from native_cases import Loaded
from torch import Tensor
from triton_cases import Case, make_case, packed_case

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.deployment import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import load_inputs
from kdecode.kernels.contract import PartBlock, Tolerance
from kdecode.model.outline import outline_model
from kdecode.model.parameters import Mxfp4
from kdecode.model.rank_share import share_of, take
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import assert_close, bit_equal

# The bounds of one rank against the reference.
LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)


def divisible(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        vocab_size=178,
        kda=replace(config.kda, num_heads=4),
        mla=replace(config.mla, num_heads=4),
        moe=replace(config.moe, expert_width=64),
    )


def cut(value: Any, slot: str, ranks: Ranks) -> Any:
    """A rank's part of canonical parameters, by the table of `rank_share`."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return take(value, slot, ranks)
    if isinstance(value, Mxfp4):
        return Mxfp4(take(value.packed, slot, ranks), take(value.scale, slot, ranks))
    if isinstance(value, tuple):
        names = ["" if slot == "layers" else f"{slot}.{number}" for number in range(len(value))]
        return tuple(cut(item, name, ranks) for item, name in zip(value, names, strict=True))
    assert is_dataclass(value)
    prefix = f"{slot}." if slot else ""
    parts = {f.name: cut(getattr(value, f.name), prefix + f.name, ranks) for f in fields(value)}
    return replace(value, **parts)  # type: ignore[type-var]


class Neighbours:
    """Blocks of ranks that are all in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[str, list[PartBlock]] = defaultdict(list)

    def block(self, name: str, num_bytes: int) -> PartBlock:
        """Of the ranks one after the other; when all have one, each knows where the others are."""
        part = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
        sources = torch.zeros(self.size, dtype=torch.int64, device=DEVICE)
        blocks = self.blocks[name]
        blocks.append(PartBlock(part, sources, lambda: None))
        if len(blocks) == self.size:
            places = torch.tensor([block.part.data_ptr() for block in blocks])
            for block in blocks:
                block.sources.copy_(places)
        return blocks[-1]


@dataclass(frozen=True)
class Share:
    """What one rank has, and its plan."""

    plan: DecodePlan
    caches: Caches


def shares(case: Case, size: int, rows: int, each: int, whole: Caches) -> list[Share]:
    """Of every rank. whole: what the caches of one rank would have, on the host."""
    exchange, found = Neighbours(size), []
    for rank in range(size):
        ranks = Ranks(rank, size)
        share = packed_case(share_of(case.config, size), cut(case.parameters, "", ranks))
        caches = own_caches(share, whole, ranks)
        plan = latency_specialized.build(
            rank_deployment(share.config, ranks, exchange), share.packed, caches, rows, each
        )
        found.append(Share(plan, caches))
    return found


def rank_deployment(config: ModelConfig, ranks: Ranks, exchange: Any) -> Deployment:
    return replace(deployment(config), ranks=ranks, shared=exchange)


def own_caches(share: Case, whole: Caches, ranks: Ranks) -> Caches:
    size = whole.num_slots, whole.num_pages, whole.page_tokens
    own = Caches.allocate(share.config, DEVICE, *size)
    for layer, state in whole.recurrent.items():
        own.recurrent[layer].copy_(own_part(state, ranks, 1))
        windows = [own_part(window, ranks, 2) for window in whole.conv[layer].chunk(3, dim=2)]
        own.conv[layer].copy_(torch.cat(windows, dim=2))
    for layer, pages in whole.pages.items():
        own.pages[layer].copy_(pages)
    return own


def own_part(whole: Tensor, ranks: Ranks, dim: int) -> Tensor:
    begin, end = ranks.span(whole.shape[dim])
    return whole.narrow(dim, begin, end - begin)


def run_in_turn(plans: list[DecodePlan], batch: StepBatch) -> None:
    for plan in plans:
        poison(plan)
        load_inputs(plan, batch)
    for index in range(len(plans[0].steps)):
        for plan in plans:
            plan.steps[index].run()


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(divisible(CONFIGS[request.param]))


def test_a_plan_that_runs_needs_an_exchange() -> None:
    config = share_of(divisible(CONFIGS["linear"]), 2)
    where = rank_deployment(config, Ranks(0, 2), None)
    packed = outline_model(config, "rows", "mxfp4_rows", Ranks(0, 2))
    with pytest.raises(ValueError, match="runs with what they exchange values through"):
        latency_specialized.build(where, packed, Caches.allocate(config, DEVICE, 1, 1, 8), 1)
    plan = latency_specialized.describe(where, packed, 1)
    assert sum(bool(step.exchanges) for step in plan.steps) == 2 + 2 + 2 * 3


@pytest.mark.parametrize(
    ("case", "contexts"),
    [("k3", [70]), ("k3", [0, 63, 130]), ("linear", [5, 64])],
    indirect=["case"],
)
def test_two_ranks_have_together_what_one_has(case: Case, contexts: list[int]) -> None:
    loaded = Loaded(case.packed, case.parameters)
    twins, batch = Twins.of(loaded), decode_batch(contexts)
    twins.fill(batch, seed=1)
    found = shares(case, 2, len(contexts), 1, twins.theirs)
    run_in_turn([share.plan for share in found], batch)
    oracle = loaded.oracle(twins.theirs)
    oracle.buffers.batch = batch
    oracle.run()
    first, second = (share.plan.buffers for share in found)
    for name in ("prefix", "logits", "attn_delta"):
        bit_equal(second[name], first[name], name)
    assert_close(first["logits"].cpu(), oracle.buffers["logits"], LOGITS, "logits")
    slots = [request.slot for request in batch.requests]
    for layer, wanted in twins.theirs.recurrent.items():
        heads = torch.cat([share.caches.recurrent[layer].cpu() for share in found], dim=1)
        error = torch.linalg.norm(heads[slots] - wanted[slots]) / torch.linalg.norm(wanted[slots])
        assert error < 0.05, f"state of layer {layer}"
