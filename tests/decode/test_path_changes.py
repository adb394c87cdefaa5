"""Requests between the two paths: mid-stream changes, limits, and rows that harm no other.

States pass from one path to the other in the caches, so each step is compared with the oracle from
equal caches: an expert that changes place at a tie stays the affair of its own step.
"""

from __future__ import annotations

import pytest
import torch
from native_cases import NUM_SLOTS, PAGE_TOKENS, Loaded, fill, make_requests

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.decode.runner import SPECIALIZED, STANDARD, StepRunner, load_inputs
from kdecode.decode.step_check import StepError
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.kernels.contract import Tolerance
from kdecode.testing.compare import assert_close, bit_equal

# The prompt ends one token before a page does, so that the stream crosses the page.
PROMPT, PAGES, SLOT = PAGE_TOKENS - 4, (7, 2), 4


def _pools(caches: Caches) -> list[torch.Tensor]:
    return [*caches.conv.values(), *caches.recurrent.values(), *caches.pages.values()]


def _prompt() -> StepRequest:
    return StepRequest(tuple(range(40, 40 + PROMPT)), 0, SLOT, PAGES, is_decode=False)


def _token(number: int) -> StepRequest:
    return StepRequest((60 + number,), PROMPT + number, SLOT, PAGES, is_decode=True)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("first", [SPECIALIZED, STANDARD])
def test_a_request_changes_path_at_every_token(
    loaded: Loaded, cache_dtype: str, first: str
) -> None:
    """Each path goes on from the state that the other one left, over the end of a page."""
    caches, oracle_caches = loaded.caches(cache_dtype), loaded.caches(cache_dtype)
    runner = StepRunner(loaded.packed, caches, loaded.engine(cache_dtype=cache_dtype))
    oracle = loaded.oracle(oracle_caches)
    # No prepared plan serves nine rows.
    plans = {SPECIALIZED: runner.plan(1), STANDARD: runner.plan(9)}
    assert [plan.backend for plan in plans.values()] == ["latency_specialized", "auto"]
    runner.run(StepBatch((_prompt(),)))
    path = first
    for number in range(8):
        copy_caches(caches, oracle_caches)
        batch = StepBatch((_token(number),))
        checks = list(check_steps(plans[path], oracle, batch, loaded.parameters))
        assert [str(check) for check in checks if not check.is_within] == [], path
        path = STANDARD if path == SPECIALIZED else SPECIALIZED


def test_states_of_a_free_run_over_both_paths(loaded: Loaded) -> None:
    """Below the first router nothing can flip: there the errors of all steps add up to little."""
    config = loaded.packed.config
    caches, oracle_caches = loaded.caches("bf16"), loaded.caches("bf16")
    runner = StepRunner(loaded.packed, caches, loaded.engine())
    oracle, router = loaded.oracle(oracle_caches), config.mlp_kinds.index("moe")
    last = max(i for i, step in enumerate(oracle.steps) if step.layers == (router,))
    paths = []
    for number in range(-1, 8):
        request = _prompt() if number < 0 else _token(number)
        # A prefill beside it sends every other decode step to the standard path.
        other = StepRequest((5,), 0, 6, (9,), is_decode=False)
        batch = StepBatch((request, other) if number % 2 == 0 else (request,))
        caches.clear_slot(6)
        runner.run(batch)
        paths.append(runner.last_path[0])
        oracle.buffers.batch = StepBatch((request,))
        oracle.run_until(last)
    assert paths == [STANDARD, *[STANDARD, SPECIALIZED] * 4]
    assert runner.stats.coverage == 0.5
    assert dict(runner.stats.decode_steps) == {
        (SPECIALIZED, ""): 4,
        (STANDARD, "mixed prefill and decode"): 4,
    }
    below = [layer for layer in caches.recurrent if layer <= router]
    assert below
    bound = Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=5e-3)
    for layer in below:
        gold = oracle_caches.recurrent[layer][SLOT]
        assert_close(caches.recurrent[layer][SLOT], gold, bound, f"state of layer {layer}")


def test_nine_rows_run_on_the_standard_path_and_are_counted(loaded: Loaded) -> None:
    requests = make_requests([3] * 9)
    caches, oracle_caches = loaded.caches("bf16"), loaded.caches("bf16")
    fill(caches, requests, seed=3)
    copy_caches(caches, oracle_caches)
    runner = StepRunner(loaded.packed, caches, loaded.engine())
    logits = runner.run(StepBatch(requests))
    assert runner.last_path == (STANDARD, "rows above 8")
    assert logits.shape[0] == 9
    assert bool(torch.isfinite(logits).all())
    runner.run(StepBatch(requests[:8]))
    assert runner.last_path == (SPECIALIZED, "")
    assert runner.stats.coverage == 0.5


@pytest.mark.parametrize("rows", [3, 9])
def test_a_row_of_nan_spoils_no_other(loaded: Loaded, rows: int) -> None:
    """One request's state is NaN: every other row and every other request's memory is unharmed."""
    requests = make_requests([5, 70, 9, 1, 2, 3, 4, 6, 8][:rows])
    sound, broken = loaded.caches("bf16"), loaded.caches("bf16")
    fill(sound, requests, seed=4)
    copy_caches(sound, broken)
    for state in broken.recurrent.values():
        state[requests[1].slot] = float("nan")
    results = []
    for caches in (sound, broken):
        runner = StepRunner(loaded.packed, caches, loaded.engine())
        results.append(runner.run(StepBatch(requests)))
        assert runner.last_path[0] == (SPECIALIZED if rows <= 8 else STANDARD)
    others = [row for row in range(rows) if row != 1]
    assert bool(torch.isnan(results[1][1]).all())
    if rows <= 8:
        bit_equal(results[1][others], results[0][others], "logits")
    else:
        # With another number of rows an expert's product may sum in another order.
        limit = Tolerance(rtol=2e-2, atol=0.1, rms_ratio=2e-2)
        assert_close(results[1][others], results[0][others], limit, "logits")
    for layer, state in broken.recurrent.items():
        slots = [requests[row].slot for row in others]
        assert bool(torch.isfinite(state[slots]).all()), f"state of layer {layer}"


def test_the_last_token_of_the_longest_context(loaded: Loaded) -> None:
    """A context of max_context_tokens is served by both paths; one more is refused by both."""
    limit = 2 * PAGE_TOKENS
    caches, oracle_caches = loaded.caches("bf16"), loaded.caches("bf16")
    runner = StepRunner(loaded.packed, caches, loaded.engine(max_context_tokens=limit))
    (request,) = make_requests([limit - 1])
    fill(caches, (request,), seed=5)
    oracle = loaded.oracle(oracle_caches)
    for plan in (runner.plan(1), runner.plan(9)):
        copy_caches(caches, oracle_caches)
        checks = list(check_steps(plan, oracle, StepBatch((request,)), loaded.parameters))
        assert [str(check) for check in checks if not check.is_within] == [], plan.backend


@pytest.fixture(scope="module")
def strict(loaded: Loaded) -> tuple[StepRunner, Caches]:
    caches = loaded.caches("bf16")
    return StepRunner(loaded.packed, caches, loaded.engine(max_context_tokens=LONGEST)), caches


LONGEST = 100
GOOD = StepRequest((3,), start=10, slot=1, pages=(2, 0), is_decode=True)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ((StepRequest((3,), LONGEST, 1, (2, 0), True),), "would have 101 tokens after the step"),
        ((StepRequest((3,), 2**31, 1, (2, 0), True),), "max_context_tokens is 100"),
        ((StepRequest((3,), -1, 1, (2, 0), True),), "starts at position -1"),
        ((StepRequest((3,), PAGE_TOKENS, 1, (2,), True),), "65 tokens need 2"),
        ((StepRequest((3,), 10, 1, (), True),), "has 0 pages of 64 tokens; 11 tokens need 1"),
        ((StepRequest((3,), 10, NUM_SLOTS, (2, 0), True),), "KDA slot 10 of request 0"),
        ((StepRequest((3,), 10, -1, (2, 0), True),), "KDA slot -1 of request 0"),
        ((StepRequest((3,), 10, 1, (48, 0), True),), "MLA page 48 of request 0"),
        ((StepRequest((3,), 10, 1, (-1, 0), True),), "MLA page -1 of request 0"),
        ((StepRequest((3,), PAGE_TOKENS, 1, (2, 2), True),), "MLA page 2 of request 0 is used"),
        ((StepRequest((10**6,), 10, 1, (2, 0), True),), "Token 0 of request 0 is 1000000"),
        ((StepRequest((-1,), 10, 1, (2, 0), True),), "Token 0 of request 0 is -1"),
        ((GOOD, StepRequest((3,), 10, 1, (5,), True)), "KDA slot 1 of request 1 is used twice"),
        ((GOOD, StepRequest((3,), 10, 4, (2,), True)), "MLA page 2 of request 1 is used twice"),
    ],
)
def test_both_paths_refuse_a_bad_step_alike_and_touch_nothing(
    strict: tuple[StepRunner, Caches], requests: tuple[StepRequest, ...], message: str
) -> None:
    runner, caches = strict
    before, found = [pool.clone() for pool in _pools(caches)], []
    for mixed in (False, True):
        # A prefill as the last request sends the step to the standard path.
        prefill = StepRequest((1, 2), 0, 7, (9,), is_decode=False)
        batch = StepBatch((*requests, prefill) if mixed else requests)
        with pytest.raises(StepError) as raised:
            runner.run(batch)
        found.append(str(raised.value))
        for pool, old in zip(_pools(caches), before, strict=True):
            bit_equal(pool, old, "a pool")
        assert runner.stats.coverage is None
    assert found[0] == found[1]
    assert message in found[0]


def test_a_prepared_plan_takes_its_own_number_of_rows(loaded: Loaded) -> None:
    runner = StepRunner(loaded.packed, loaded.caches("bf16"), loaded.engine())
    with pytest.raises(StepError, match="1 rows of 1 requests; this plan takes 2 rows"):
        load_inputs(runner.plan(2), StepBatch((GOOD,)))
    two = StepRequest((3, 4), 10, 1, (2, 0), is_decode=True)
    with pytest.raises(StepError, match="2 rows of 1 requests; this plan takes 2 rows"):
        load_inputs(runner.plan(2), StepBatch((two,)))
