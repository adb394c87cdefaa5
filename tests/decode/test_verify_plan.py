"""Plans of verify steps: every buffer against the oracle, and every bit against plain steps.

The oracle of the roll-back is plain decoding on caches of its own. Free slots, free pages, the rows
behind a request's length and everything that a step writes are NaN before it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_cases import NUM_SLOTS, PAGE_TOKENS, Loaded, fill, verify_step

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import UncommittedError
from kdecode.decode import latency_specialized
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import SPECIALIZED, STANDARD, StepRunner, deployment_of, load_inputs
from kdecode.decode.step_check import StepError
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.kernels.common.native import supported_isas
from kdecode.testing.compare import bit_equal
from kdecode.testing.poison import poison_

CONTEXTS = [62, 1, 130, 0]


def _filled(loaded: Loaded, batch: StepBatch, cache_dtype: str = "bf16") -> tuple[Caches, Caches]:
    ours, theirs = loaded.caches(cache_dtype), loaded.caches(cache_dtype)
    fill(ours, batch.requests, seed=3)
    copy_caches(ours, theirs)
    return ours, theirs


def _poison(plan: DecodePlan) -> None:
    for name, tensor in plan.buffers.items():
        if name != "kept_rows" and not name.startswith("row_"):
            poison_(tensor)
    for effects in plan.buffers.effects.values():
        for tensor in (effects.keys, effects.decays, effects.corrections, effects.samples):
            poison_(tensor)


def _plan(loaded: Loaded, caches: Caches, batch: StepBatch, **engine: object) -> DecodePlan:
    deployment = deployment_of(loaded.packed.config, loaded.engine(**engine))
    each = len(batch.requests[0].token_ids)
    plan = latency_specialized.build(deployment, loaded.packed, caches, batch.num_rows, each)
    _poison(plan)
    return plan


def _step(request: StepRequest, place: int) -> StepBatch:
    """One row of a verified request as a plain step."""
    return StepBatch(
        (
            replace(
                request,
                token_ids=request.token_ids[place : place + 1],
                start=request.start + place,
                all_logits=False,
                is_verify=False,
            ),
        )
    )


@pytest.mark.parametrize(
    ("num_requests", "each", "isa", "cache_dtype"),
    [
        (1, 8, None, "bf16"),
        (2, 4, None, "fp8"),
        (3, 8, None, "bf16"),
        (4, 2, None, "bf16"),
        *((1, 5, isa, "bf16") for isa in supported_isas()),
    ],
)
def test_every_step_against_the_oracle(
    loaded: Loaded, num_requests: int, each: int, isa: str | None, cache_dtype: str
) -> None:
    batch = verify_step(CONTEXTS[:num_requests], each)
    caches, oracle_caches = _filled(loaded, batch, cache_dtype)
    plan = _plan(loaded, caches, batch, isa=isa, cache_dtype=cache_dtype)
    checks = list(check_steps(plan, loaded.oracle(oracle_caches), batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    assert {"conv", "recurrent", "cache row", "route", "logits"} <= {c.buffer for c in checks}
    assert not caches.open_rows.slots


@pytest.mark.parametrize(("num_requests", "each"), [(1, 8), (2, 4), (4, 2), (3, 5)])
def test_what_stays_has_the_bits_of_plain_decoding(
    loaded: Loaded, num_requests: int, each: int
) -> None:
    """Every number of kept rows, uneven in a batch, and a plain step behind it."""
    batch = verify_step(CONTEXTS[:num_requests], each)
    for kept in range(1, each + 1):
        counts = [(kept + place - 1) % each + 1 for place in range(num_requests)]
        ours, theirs = _filled(loaded, batch)
        before = {layer: state.clone() for layer, state in ours.recurrent.items()}
        plan = _plan(loaded, ours, batch)
        load_inputs(plan, batch)
        plan.run()
        for layer, state in ours.recurrent.items():
            bit_equal(state, before[layer], f"state of layer {layer} before the commit")
        logits = plan.buffers["logits"].clone()
        held = ours.commit(dict(zip([r.slot for r in batch.requests], counts, strict=True)))
        one = latency_specialized.build(
            deployment_of(loaded.packed.config, loaded.engine()), loaded.packed, theirs, 1
        )
        for row, (request, count) in enumerate(zip(batch.requests, counts, strict=True)):
            assert held[request.slot] == request.start + count
            for place in range(count):
                load_inputs(one, _step(request, place))
                one.run()
                bit_equal(logits[row * each + place], one.buffers["logits"][0], f"row {place}")
        _compare_held(ours, theirs, batch, held)
        if kept < each:
            _plain_step_behind(loaded, ours, one, batch, counts)


def _compare_held(ours: Caches, theirs: Caches, batch: StepBatch, held: dict[int, int]) -> None:
    """Slots whole; cache rows up to the length of each request."""
    for layer, state in ours.recurrent.items():
        bit_equal(state, theirs.recurrent[layer], f"states of layer {layer}")
        bit_equal(ours.conv[layer], theirs.conv[layer], f"windows of layer {layer}")
    for layer, pages in ours.pages.items():
        for request in batch.requests:
            own = [x[list(request.pages)].flatten(0, 1) for x in (pages, theirs.pages[layer])]
            end = held[request.slot]
            bit_equal(own[0][:end], own[1][:end], f"cache rows of layer {layer}")


def _plain_step_behind(
    loaded: Loaded, ours: Caches, one: DecodePlan, batch: StepBatch, counts: list[int]
) -> None:
    own = latency_specialized.build(
        deployment_of(loaded.packed.config, loaded.engine()), loaded.packed, ours, 1
    )
    for request, count in zip(batch.requests, counts, strict=True):
        step = _step(replace(request, token_ids=(9,), start=request.start + count), 0)
        for plan in (own, one):
            load_inputs(plan, step)
            plan.run()
        bit_equal(own.buffers["logits"], one.buffers["logits"], "logits of a plain step behind it")


def test_two_runs_of_one_plan_with_other_slots_and_counts(loaded: Loaded) -> None:
    """Nothing of the last step's metadata, records or kept rows is used again."""
    batch = verify_step([5, 64], 4)
    ours, theirs = _filled(loaded, batch)
    plan = _plan(loaded, ours, batch)
    one = latency_specialized.build(
        deployment_of(loaded.packed.config, loaded.engine()), loaded.packed, theirs, 1
    )
    starts = [request.start for request in batch.requests]
    for order, counts in (((0, 1), (1, 4)), ((1, 0), (2, 1)), ((0, 1), (3, 2))):
        requests = [replace(batch.requests[n], start=starts[n]) for n in order]
        load_inputs(plan, StepBatch(tuple(requests)))
        plan.run()
        held = ours.commit({r.slot: count for r, count in zip(requests, counts, strict=True)})
        for place, (n, count) in enumerate(zip(order, counts, strict=True)):
            for row in range(count):
                load_inputs(one, _step(requests[place], row))
                one.run()
            starts[n] += count
        _compare_held(ours, theirs, StepBatch(tuple(requests)), held)


def test_a_request_that_ends_before_the_commit(loaded: Loaded) -> None:
    """Its slot keeps the state before the step; the other's moves; no later step sees a draft."""
    batch = verify_step([5, 64], 4)
    ours, _ = _filled(loaded, batch)
    ours.slot_pool.allocate(NUM_SLOTS)
    gone, stays = batch.requests
    before = {layer: state.clone() for layer, state in ours.recurrent.items()}
    plan = _plan(loaded, ours, batch)
    load_inputs(plan, batch)
    plan.run()
    with pytest.raises(UncommittedError, match="neither committed nor dropped"):
        load_inputs(plan, batch)
    ours.free_slot(gone.slot)
    with pytest.raises(ValueError, match=f"slots with open rows are .{stays.slot}."):
        ours.commit({gone.slot: 1})
    ours.commit({stays.slot: 2})
    for layer, state in ours.recurrent.items():
        bit_equal(state[gone.slot], before[layer][gone.slot], f"state of layer {layer}")
        assert not torch.equal(state[stays.slot], before[layer][stays.slot])
    load_inputs(plan, batch)


def test_which_verify_steps_have_a_plan(loaded: Loaded) -> None:
    caches = loaded.caches("bf16")
    engine = loaded.engine(max_requests=2)
    runner = StepRunner(loaded.packed, caches, engine, verify_rows=(4, 8))
    even, eight = verify_step([5, 64], 4), verify_step([5], 8)
    ragged = StepBatch((*verify_step([5], 3).requests, *verify_step([5, 64], 4).requests[1:]))
    mixed = StepBatch((_step(even.requests[0], 0).requests[0], even.requests[1]))
    alone = StepBatch((even.requests[0],))
    three, many = verify_step([5], 3), verify_step(CONTEXTS[:3], 4)
    silent = StepBatch((replace(alone.requests[0], all_logits=False),))
    expected = [
        (even, (SPECIALIZED, "")),
        (eight, (SPECIALIZED, "")),
        (alone, (SPECIALIZED, "")),
        (ragged, (STANDARD, "uneven drafts")),
        (mixed, (STANDARD, "requests with and without drafts")),
        (three, (STANDARD, "a number of drafts without a plan")),
        (many, (STANDARD, "rows above 8")),
        (silent, (STANDARD, "a decode row without logits")),
    ]
    for batch, path in expected:
        fill(caches, batch.requests, seed=5)
        logits = runner.run(batch)
        assert runner.last_path == path
        wanted = [len(r.token_ids) if r.all_logits else 1 for r in batch.requests]
        assert logits.shape[0] == sum(wanted)
        assert bool(torch.isfinite(logits).all())
        # Both paths leave the same thing open, so the number that stays is theirs alike.
        verified = {r.slot: 1 for r in batch.requests if r.is_verify}
        assert caches.open_rows.slots == verified.keys()
        caches.commit(verified)
    assert runner.stats.coverage == 3 / len(expected)


def test_a_plan_takes_its_own_steps_only(loaded: Loaded) -> None:
    caches = loaded.caches("bf16")
    batch = verify_step([5, 64], 4)
    plan = _plan(loaded, caches, batch)
    for wrong, message in (
        (verify_step([5], 8), "8 rows of 1 requests; this plan takes 8 rows, 4 a request"),
        (
            StepBatch(tuple(replace(r, is_verify=False) for r in batch.requests)),
            "A plan of 4 rows a request verifies",
        ),
    ):
        with pytest.raises(StepError, match=message):
            load_inputs(plan, wrong)
        assert not caches.open_rows.slots
    deployment = deployment_of(loaded.packed.config, loaded.engine())
    with pytest.raises(ValueError, match="8 rows are not a number of requests of 3 each"):
        latency_specialized.describe(deployment, loaded.packed, 8, 3)
    assert PAGE_TOKENS > 8
