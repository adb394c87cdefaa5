"""Native plans of several ranks against those of one: logits, states and cache rows.

Ranks are threads that exchange through shared memory. What differs from one rank is where the sums
of divided products are rounded; what every rank has of a value is the same bits.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_cases import PAGE_TOKENS
from native_rank_cases import (
    LOGITS,
    STATE,
    Family,
    Outcome,
    build,
    check_together,
    decode,
    deployment_for,
    join_segment,
    run_native,
    segment_for,
    shared_caches,
    verify,
    whole_caches,
)
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.auto import build_auto_plan, run_standard
from kdecode.decode.deployment import BackendRefusedError, Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import load_inputs
from kdecode.kernels.common.native import supported_isas
from kdecode.kernels.contract import Exchange
from kdecode.model.outline import outline_model
from kdecode.model.rank_share import share_of
from kdecode.model.synthesis import make_checkpoint
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.context import ContextShare
from kdecode.parallel.ranks import ALONE, RankError, Ranks
from kdecode.parallel.shared import Segment
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.ranks import run_ranks


@pytest.fixture(scope="module", params=["mini_16_checkpoint", "mini_linear_16_checkpoint"])
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.getfixturevalue(request.param), {})


@pytest.mark.parametrize(
    ("size", "rows"),
    [*((2, rows) for rows in range(1, 9)), (2, 33), (4, 7), (8, 3), (16, 2)],
)
def test_ranks_have_together_what_one_rank_has(family: Family, size: int, rows: int) -> None:
    batch = decode(rows)
    whole = whole_caches(family, batch)
    (one,) = run_native(family, 1, [batch], whole)
    found = run_native(family, size, [batch], whole)
    check_together(found, one, batch)
    # The first layer's state comes before any sum of parts.
    slots = [request.slot for request in batch.requests]
    heads = torch.cat([outcome.caches.recurrent[0] for outcome in found], dim=1)
    bit_equal(heads[slots], one.caches.recurrent[0][slots], "states of layer 0")


@pytest.mark.parametrize(
    ("size", "requests", "each", "kept"), [(2, 3, 4, 2), (4, 1, 8, 8), (16, 2, 3, 1)]
)
def test_verify_steps_and_what_stays_of_them(
    family: Family, size: int, requests: int, each: int, kept: int
) -> None:
    """And a plain step behind, on the committed states."""
    batch = verify(requests, each)
    behind = StepBatch(
        tuple(
            replace(
                request,
                token_ids=(9,),
                start=request.start + kept,
                all_logits=False,
                is_verify=False,
            )
            for request in batch.requests
        )
    )
    whole = whole_caches(family, batch)
    for steps in ([batch], [batch, behind]):
        (one,) = run_native(family, 1, steps, whole, kept)
        check_together(run_native(family, size, steps, whole, kept), one, steps[-1], kept)


def test_an_fp8_cache_is_the_same_on_every_rank(family: Family) -> None:
    batch = decode(3)
    whole = whole_caches(family, batch, "fp8")
    (one,) = run_native(family, 1, [batch], whole, cache_dtype="fp8")
    found = run_native(family, 4, [batch], whole, cache_dtype="fp8")
    for outcome in found[1:]:
        bit_equal(outcome.logits, found[0].logits, "logits")
    assert_close(found[0].logits, one.logits, LOGITS, "logits")


@pytest.mark.parametrize("isa", supported_isas())
def test_bits_do_not_depend_on_the_number_of_threads(family: Family, isa: str) -> None:
    batch = decode(5)
    whole = whole_caches(family, batch)
    found = [
        run_native(family, 2, [batch], whole, threads=threads, isa=isa)[1] for threads in (1, 2, 3)
    ]
    for other in found[1:]:
        bit_equal(other.logits, found[0].logits, "logits")
        for layer, state in found[0].caches.recurrent.items():
            bit_equal(other.caches.recurrent[layer], state, f"states of layer {layer}")


def run_standard_plans(
    family: Family, size: int, batch: StepBatch, whole: Caches, kept: int
) -> list[Outcome]:
    """What `auto` leaves, on several ranks or on one."""

    def step(ranks: Ranks, exchange: Exchange | None) -> Outcome:
        caches = shared_caches(family, whole, ranks)
        engine = family.loaded(ALONE).engine(decode_backend="auto")
        plan = build_auto_plan(family.share(ranks), caches, engine, ranks, exchange)
        logits = run_standard(plan, batch)
        caches.commit({r.slot: kept for r in batch.requests if r.is_verify})
        return Outcome(logits, plan.buffers["prefix"], caches)

    return [step(ALONE, None)] if size == 1 else run_ranks(size, step)


@pytest.mark.parametrize("batch", [decode(4), verify(2, 4)], ids=["decode", "verify"])
def test_both_backends_of_several_ranks_agree(family: Family, batch: StepBatch) -> None:
    whole = whole_caches(family, batch)
    found = run_native(family, 4, [batch], whole, kept=2)
    others = run_standard_plans(family, 4, batch, whole, kept=2)
    slots = [request.slot for request in batch.requests]
    for native, auto in zip(found, others, strict=True):
        assert_close(native.logits, auto.logits, LOGITS, "logits")
        for layer, state in auto.caches.recurrent.items():
            ours = native.caches.recurrent[layer][slots]
            assert_close(ours, state[slots], STATE, f"states of layer {layer}")


def check_larger(directory: Path) -> None:
    """With so many experts some are chosen otherwise, as between the backends of one rank: two
    ranks are as near to one as these are to each other."""
    family = Family(directory, {})
    for batch, kept in ((decode(2), 1), (verify(1, 4), 2)):
        whole = whole_caches(family, batch)
        (one,) = run_native(family, 1, [batch], whole, kept)
        (auto,) = run_standard_plans(family, 1, batch, whole, kept)
        two = run_native(family, 2, [batch], whole, kept)
        bit_equal(two[1].logits, two[0].logits, "logits")
        near = rms_error(auto.logits, one.logits)
        assert rms_error(two[0].logits, one.logits) < 1.5 * near
        slots = [request.slot for request in batch.requests]
        for layer, gold in one.caches.recurrent.items():
            heads = torch.cat([outcome.caches.recurrent[layer] for outcome in two], dim=1)
            near = rms_error(auto.caches.recurrent[layer][slots], gold[slots])
            assert rms_error(heads[slots], gold[slots]) < 1.5 * near + 1e-3, f"layer {layer}"


def rms_error(value: Tensor, gold: Tensor) -> float:
    """RMS of the error over RMS of gold."""
    return float((value - gold).square().mean().sqrt() / gold.square().mean().sqrt())


@pytest.mark.slow
def test_two_ranks_of_a_larger_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "medium", "medium", seed=0)
    check_larger(tmp_path / "medium")


def test_two_plans_of_one_exchange_by_turns(family: Family) -> None:
    """Plans of other rows on one group, step by step and whole: the parts of none are left over."""
    first, second = decode(2), decode(1)
    whole = whole_caches(family, first)

    def body(segment: Segment, ranks: Ranks) -> list[Tensor]:
        shared = join_segment(segment, ranks)
        deployment = deployment_for(family, ranks, shared)
        found = []
        for number, batch in enumerate((first, second, first, second, second)):
            caches = shared_caches(family, whole, ranks)
            plan = build(deployment, family.share(ranks), caches, batch)
            load_inputs(plan, batch)
            if number % 2:
                plan.run_until(len(plan.steps) - 1)
            else:
                plan.run_range(0, 5)
                plan.run_range(5, len(plan.steps))
            found.append(plan.buffers["logits"])
        return found

    with segment_for(family, 2) as segment:
        for found in run_ranks(2, lambda ranks, _: body(segment, ranks)):
            bit_equal(found[2], found[0], "logits of two rows")
            bit_equal(found[3], found[1], "logits of one row")
            bit_equal(found[4], found[1], "logits of one row")


def test_a_token_that_does_not_exist_is_nan_on_every_rank(family: Family) -> None:
    """What a missing check would show; see embed."""
    batch = decode(2)
    whole = whole_caches(family, batch)

    def body(segment: Segment, ranks: Ranks) -> Tensor:
        shared = join_segment(segment, ranks)
        caches = shared_caches(family, whole, ranks)
        plan = build(deployment_for(family, ranks, shared), family.share(ranks), caches, batch)
        load_inputs(plan, batch)
        plan.buffers["row_token"][1] = 10**6
        plan.run_until(0)
        return plan.buffers["prefix"].clone()

    with segment_for(family, 4) as segment:
        for prefix in run_ranks(4, lambda ranks, _: body(segment, ranks)):
            assert bool(prefix[1].isnan().all())
            bit_equal(prefix[0], family.share(ALONE).embed[3], "the other row")


def test_an_exchange_that_fails_says_who_was_waited_for_and_where(
    mini_16_checkpoint: Path,
) -> None:
    family, batch = Family(mini_16_checkpoint, {}), decode(1)
    plans = {}
    with segment_for(family, 2) as segment:
        for rank, timeout_s in enumerate((1.5, 20.0)):
            ranks = Ranks(rank, 2)
            caches = shared_caches(family, whole_caches(family, batch), ranks)
            shared = join_segment(segment, ranks, timeout_s=timeout_s)
            deployment = deployment_for(family, ranks, shared)
            plans[rank] = build(deployment, family.share(ranks), caches, batch)
            load_inputs(plans[rank], batch)
        del shared, deployment
        # Rank 1 ends before the first step of layer 2 that exchanges, and its life with it.
        leaving = threading.Thread(target=lambda: plans.pop(1).run_range(0, 9))
        leaving.start()
        with pytest.raises(RankError) as raised:
            plans[0].run()
        leaving.join()
    assert raised.value.rank == 1
    assert str(raised.value) == (
        "Rank 1 of 2 gave no sign of life for 1.5 s while rank 0 waited for it in the exchange of "
        "attn_delta of layer 2"
    )
    with pytest.raises(RankError, match="in exchange 7"):
        plans[0].run()


def described(config: ModelConfig, ranks: Ranks) -> DecodePlan:
    share = share_of(config, ranks.size)
    deployment = Deployment(
        config=share,
        device="cpu",
        isa="avx2",
        threads=None,
        cache_dtype="bf16",
        page_tokens=PAGE_TOKENS,
        max_context_tokens=128,
        ranks=ranks,
    )
    return latency_specialized.describe(deployment, outline_model(share, "tiles", ranks=ranks), 8)


def test_the_plan_says_what_is_exchanged(mini_16_checkpoint: Path) -> None:
    config = CheckpointReader(mini_16_checkpoint).config
    lines = described(config, Ranks(3, 4)).explain().splitlines()
    assert "exchanged bytes" in lines[1]
    found = {line.split()[2]: line for line in lines[2:] if line.strip()[0].isdigit()}
    assert " gather prefix 512 " in found["embed"]
    assert " reduce attn_delta 1,024 " in found["attn_out"]
    assert " gather router_logits + latent 96 " in found["moe_front"]
    assert " reduce expert_sum + shared 1,536; gather routed 128 " in found["moe_tail"]
    assert " gather logits 768 " in found["head"]
    assert lines[-4:] == [
        "a step: 20 exchanges, 14,464 bytes that each rank gives of a row",
        "a layer of kda and dense: 2 exchanges, 2,048 bytes that each rank gives of a row",
        "a layer of kda and moe: 4 exchanges, 2,784 bytes that each rank gives of a row",
        "a layer of mla and moe: 4 exchanges, 2,784 bytes that each rank gives of a row",
    ]
    assert "exchange" not in described(config, ALONE).explain()


def test_what_several_ranks_cannot_run_is_refused(mini_16_checkpoint: Path) -> None:
    family = Family(mini_16_checkpoint, {})
    batch = decode(1)
    deployment = deployment_for(family, Ranks(0, 2), None)
    caches = shared_caches(family, whole_caches(family, batch), Ranks(0, 2))
    with pytest.raises(BackendRefusedError, match="ranks on several hosts have none"):
        latency_specialized.build(deployment, family.share(Ranks(0, 2)), caches, 1)
    context = ContextShare(Ranks(0, 2))
    cuda = replace(deployment, device="cuda", arch="sm_90", context=context)
    assert "a CUDA plan attend to whole contexts" in latency_specialized.refuse(cuda)[0]
    odd = replace(deployment, ranks=Ranks(0, 96))
    reasons = latency_specialized.refuse(odd)
    assert "Native steps exchange values among up to 64 ranks; there are 96." in reasons
    assert "32 experts cannot be divided among 96 ranks." in reasons
    segment = Segment(2, 4096)
    shared = join_segment(segment, Ranks(0, 2))
    small = replace(deployment, shared=shared)
    with pytest.raises(ValueError, match=r"gives a part of .* bytes to the other ranks"):
        latency_specialized.build(small, family.share(Ranks(0, 2)), caches, 64)
    segment.close()
