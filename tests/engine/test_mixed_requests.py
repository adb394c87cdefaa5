"""Mixed requests at concurrency 64: each gets what it gets alone, and nothing stays behind.

The quick ones are scaled down; `pytest -m slow tests/engine/test_mixed_requests.py` runs 1,000
requests of 1 to 4,000 tokens for each kind of cache.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from mixed_requests import Alone, assert_nothing_held, check, check_exact, plan, run
from test_state_lifecycle import _poison_what_is_free

from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.config import ModelConfig
from kdecode.engine.engine import LLM
from kdecode.testing.compare import bit_equal

BACKENDS = ("auto", "latency_specialized")
# Several chunks and boundaries in prompts of 200 tokens.
SHORT_STEPS = {"max_step_tokens": 128, "state_interval_tokens": 64}
CACHES = ("plain", "prefixes", "half the pages", "preemption forced")


def _engine(
    checkpoint: Path, backend: str, cache: str, context: int, slots: int, **settings: object
) -> LLM:
    config, page_tokens = ModelConfig.from_checkpoint(checkpoint), 16
    pages_of_one = -(-context // page_tokens)
    # Of what the requests that run have on average, at their full length.
    share = {"half the pages": slots * pages_of_one // 8, "preemption forced": pages_of_one + 4}
    budget = None
    if cache in share:
        pages = share[cache]
        budget = slots * slot_bytes(config) + pages * page_bytes(config, page_tokens, "bf16")
    llm = LLM(
        checkpoint,
        decode_backend=backend,
        num_threads=1,
        page_tokens=page_tokens,
        max_context_tokens=context,
        max_requests=slots,
        cache_budget_bytes=budget,
        enable_prefix_caching=cache != "plain",
        **settings,
    )
    _poison_what_is_free(llm)
    return llm


def _alone(checkpoint: Path, backend: str, context: int, **settings: object) -> Alone:
    def build(max_step_tokens: int | None) -> LLM:
        cut = {"max_step_tokens": max_step_tokens, "state_interval_tokens": None}
        return LLM(
            checkpoint,
            decode_backend=backend,
            num_threads=1,
            page_tokens=16,
            max_context_tokens=context,
            max_requests=1,
            **{**settings, **({} if max_step_tokens is None else cut)},
        )

    return Alone(build)


def _is_exact(backend: str, cache: str) -> bool:
    """Whether a row's bits depend on nothing beside it.

    Native products, attention and plans have the same sums for any number of rows; torch's, which
    `auto` has, have not. A preempted request computes in chunks what it had computed row by row.
    """
    return backend == "latency_specialized" and cache != "preemption forced"


@pytest.fixture(scope="module")
def alone(mini_checkpoint: Path) -> Callable[..., Alone]:
    """By backend and settings; kept, because all kinds of cache are compared with the same."""
    return functools.cache(functools.partial(_alone, mini_checkpoint))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sixty_four_at_once_get_what_each_gets_alone(
    mini_checkpoint: Path, alone: Callable[..., Alone], backend: str, cache: str
) -> None:
    # Where all 64 run at once, none comes late enough to find another one's prefix.
    slots = 64 if cache == "plain" else 16
    # Longer replies need more pages than are kept free for them.
    reply = 48 if cache == "preemption forced" else 10
    llm = _engine(mini_checkpoint, backend, cache, 320, slots, **SHORT_STEPS)
    planned = plan(72 if slots == 64 else 48, longest=200, longest_reply=reply, seed=11)
    result = run(llm, planned, 64)
    assert len(result.outputs) + result.num_aborted == len(planned)
    assert result.num_aborted > 0
    assert set(result.kinds) == {"length", "stop"}
    stats = llm.stats()
    assert (stats["preemptions"] > 0) == (cache == "preemption forced")
    if cache == "prefixes":
        assert stats["prefix_cache"]["hits"] > 0
    assert_nothing_held(llm)
    by_itself = alone(backend, 320, **SHORT_STEPS)
    if _is_exact(backend, cache):
        check_exact(by_itself, planned, result, every=4)
    else:
        check(by_itself, planned, result, every=8)
    assert result.near_ties + result.other_cuts <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_do_not_depend_on_batch_mates_or_preemption(
    mini_checkpoint: Path, alone: Callable[..., Alone], backend: str
) -> None:
    """Random draws are by seed and position: up to logits' last bits, the same reply everywhere."""
    planned = [job for job in plan(120, 100, 12, seed=5) if not job.params.is_greedy][:12]
    llm = _engine(mini_checkpoint, backend, "prefixes", 128, 8, **SHORT_STEPS)
    together = run(llm, planned, 8)
    by_itself = alone(backend, 320, **SHORT_STEPS)
    same = [
        output.token_ids == by_itself.reply(planned[i]).token_ids
        for i, output in together.outputs.items()
    ]
    assert len(same) >= 8
    assert sum(same) >= len(same) - (not _is_exact(backend, "prefixes"))


@pytest.mark.parametrize("checkpoint", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_where_a_prompt_is_cut_changes_no_bit(
    checkpoint: str, request: pytest.FixtureRequest
) -> None:
    """Cuts on multiples of 64; what is left has 1 row, few or many, each with a form of its own."""
    build = _alone(request.getfixturevalue(checkpoint), "latency_specialized", 320).build
    whole, *cut = [build(tokens) for tokens in (256, 128, 64)]
    draw = random.Random(3)
    for length in (129, 130, 145, 150, 191, 192):
        prompt = [draw.randrange(1000) for _ in range(length)]
        expected = whole.teacher_forced(prompt, [5])
        for llm in cut:
            bit_equal(llm.teacher_forced(prompt, [5]), expected, f"{length} tokens")


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_mixed_requests(
    mini_checkpoint: Path, alone: Callable[..., Alone], backend: str, cache: str
) -> None:
    llm = _engine(mini_checkpoint, backend, cache, 4160, 64)
    planned = plan(1000, longest=4000, longest_reply=64, seed=1)
    result = run(llm, planned, 64)
    assert len(result.outputs) + result.num_aborted == len(planned)
    stats = llm.stats()
    assert_nothing_held(llm)
    assert (stats["preemptions"] > 0) == (cache == "preemption forced")
    if _is_exact(backend, cache):
        check_exact(alone(backend, 4160), planned, result)
    else:
        check(alone(backend, 4160), planned, result)
    # One reply in a hundred; of other near-ties there is one in ten.
    assert result.other_cuts <= 10
    print(
        f"\n{backend}, {cache}: {dict(result.kinds)}, {result.num_aborted} given up, "
        f"{stats['preemptions']} preemptions, {result.near_ties} near-ties, {result.other_cuts} "
        f"as with other cuts, {stats['prefix_cache']}"
    )
