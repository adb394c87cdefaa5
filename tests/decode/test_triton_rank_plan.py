"""CUDA plans of several ranks: their steps in turn, in this process, against one rank.

Each rank has its part of one model's weights and caches. All ranks run a step before any runs the
next one, and read each other's parts where they lie; or they are processes, which signal each other
and wait. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from cuda_cases import CONFIGS, DEVICE, Twins, decode_batch, poison
from native_cases import Loaded
from rank_cuts import divisible
from rank_plan_cases import (
    Share,
    follow_plan,
    rank_deployment,
    rank_share,
    run_in_this_process,
)
from triton_cases import Case, make_case

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.decode import latency_specialized
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import load_inputs
from kdecode.kernels.contract import PartBlock, Tolerance
from kdecode.model.outline import outline_model
from kdecode.model.rank_share import share_of
from kdecode.parallel import launch
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import assert_close, bit_equal

# The bounds of one rank against the reference.
LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)


class Neighbours:
    """Blocks of ranks that are all in this process."""

    transport = "nccl"

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


def shares(case: Case, size: int, rows: int, each: int, whole: Caches) -> list[Share]:
    """Of every rank. whole: what the caches of one rank would have, on the host."""
    exchange = Neighbours(size)
    return [rank_share(case, Ranks(r, size), exchange, rows, each, whole) for r in range(size)]


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
    # As steps of their own, or inside of others.
    for gpu_exchange, op in (("nccl", "exchange"), ("symmetric", "rank_join")):
        described = replace(where, gpu_exchange=gpu_exchange)
        plan = latency_specialized.describe(described, packed, 1)
        exchanging = [step for step in plan.steps if step.exchanges]
        assert len(exchanging) == 2 + 2 + 2 * 3
        assert exchanging[0].op == op


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


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "contexts", "steps"), [("k3", [70], 2), ("linear", [0, 5, 64], 1)]
)
def test_ranks_that_signal_each_other_have_what_one_has(
    name: str, contexts: list[int], steps: int
) -> None:
    """In steps that follow each other, each rank as fast as it comes."""
    group = launch.start(2, follow_plan, (name, contexts, steps), timeout_s=30.0)
    try:
        found = run_in_this_process(group, name, contexts, steps)
        group.wait_until_ready()
    finally:
        group.close()
    case = make_case(divisible(CONFIGS[name]))
    loaded = Loaded(case.packed, case.parameters)
    twins, batch = Twins.of(loaded), decode_batch(contexts)
    twins.fill(batch, seed=1)
    oracle = loaded.oracle(twins.theirs)
    oracle.buffers.batch = batch
    for first, second in found:
        oracle.run()
        bit_equal(second, first, "logits of two ranks")
        assert_close(first, oracle.buffers["logits"], LOGITS, "logits")
