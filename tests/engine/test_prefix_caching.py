"""Prefixes with a model: the same bits as without, over poisoned memory, with both backends."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from speculation_cases import greedy, speculative
from test_state_lifecycle import _poison_what_is_free

from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.config import ConfigError, ModelConfig
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams
from kdecode.testing.poison import poison_

BACKENDS = ("auto", "latency_specialized")


def _build(checkpoint: Path, backend: str, **settings: object) -> LLM:
    """Prefixes end on multiples of 64 tokens; a step has up to 96."""
    defaults = {
        "num_threads": 1,
        "page_tokens": 16,
        "max_context_tokens": 320,
        "max_requests": 3,
        "max_step_tokens": 96,
        "state_interval_tokens": 64,
        "enable_prefix_caching": True,
    }
    llm = LLM(checkpoint, decode_backend=backend, **{**defaults, **settings})
    _poison_what_is_free(llm)
    if llm._prefix is not None:
        for saved in llm._prefix.states._places._saved:
            poison_(saved)
    return llm


def _prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


def _logits(llm: LLM, prompt: list[int], reply: tuple[int, ...]) -> torch.Tensor:
    return llm.teacher_forced(prompt, reply)


@pytest.mark.parametrize(("cache_dtype", "scale"), [("bf16", None), ("fp8", 0.125)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_has_the_bits_of_a_miss_and_of_no_cache(
    mini_checkpoint: Path, backend: str, cache_dtype: str, scale: float | None
) -> None:
    memory = {"cache_dtype": cache_dtype, "cache_scale": scale}
    plain = _build(mini_checkpoint, backend, enable_prefix_caching=False, **memory)
    cached = _build(mini_checkpoint, backend, **memory)
    shared = _prompt(130)
    # Each has a beginning in common with the first, of every kind of length.
    prompts = [shared, shared, shared[:128], shared[:65], shared[:64], [*shared, *_prompt(90, 1)]]
    found = [0, 128, 64, 64, 0, 128]
    for prompt, expected in zip(prompts, found, strict=True):
        (alone,) = plain.generate([prompt], greedy(6))
        (output,) = cached.generate([prompt], greedy(6))
        assert (output.cached_tokens, alone.cached_tokens) == (expected, 0)
        assert output.token_ids == alone.token_ids
        forced = [_logits(llm, prompt, alone.token_ids) for llm in (plain, cached)]
        assert torch.equal(*forced)
    stats = cached.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)
    assert plain.stats()["prefix_cache"] is None
    cached.reset_prefix_cache()
    assert cached._worker.caches.page_pool.num_used == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_reports_and_time_tell_the_same_story(mini_checkpoint: Path, backend: str) -> None:
    llm = _build(mini_checkpoint, backend, state_interval_tokens=128, max_context_tokens=512)
    prompt = _prompt(330)
    first, second = (llm.generate([prompt], greedy(2))[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 256)
    found = llm.stats()["prefix_cache"]
    assert (found["queries"], found["hits"], found["recomputed"]) == (660, 256, 404)
    assert found["hit_rate"] == 256 / 660
    assert (found["min_tokens"], found["can_hit"], found["states"]) == (128, True, 2)
    # Five blocks of 64 tokens are complete, and the state behind the last of them was not kept.
    assert found["lost_to_state"] == 320 - 256
    steps = llm.stats()["prefill_steps"]
    assert steps == 5 + 1
    # One chunk of 74 tokens instead of five of 330: far more than the machine's noise.
    assert second.timing.prefill_ns < 0.6 * first.timing.prefill_ns


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_costs_no_hit(mini_checkpoint: Path, backend: str) -> None:
    """Its rows are on the shared pages: the same hits, replies and drafts as without the cache."""
    config = speculative(mini_checkpoint, 3)
    plain = _build(mini_checkpoint, backend, speculative=config, enable_prefix_caching=False)
    cached = _build(mini_checkpoint, backend, speculative=config)
    shared = _prompt(140)
    prompts = [shared, shared, [*shared[:100], 3, 4], shared]
    outputs = [
        [llm.generate([prompt], greedy(16))[0] for prompt in prompts] for llm in (plain, cached)
    ]
    assert [output.cached_tokens for output in outputs[1]] == [0, 128, 64, 128]
    for alone, output in zip(*outputs, strict=True):
        assert output.token_ids == alone.token_ids
        assert (output.rounds.rounds, output.rounds.accepted) == (
            alone.rounds.rounds,
            alone.rounds.accepted,
        )


def test_a_prompt_whose_logprobs_are_told_is_computed(mini_checkpoint: Path) -> None:
    llm = _build(mini_checkpoint, "auto")
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    outputs = [llm.generate([_prompt(70)], each)[0] for each in (greedy(2), params, greedy(2))]
    assert [output.cached_tokens for output in outputs] == [0, 0, 64]
    assert len(outputs[1].prompt_logprobs) == 69


def test_the_memory_of_states_is_bounded(mini_checkpoint: Path) -> None:
    state = slot_bytes(ModelConfig.from_checkpoint(mini_checkpoint))
    llm = _build(mini_checkpoint, "auto", state_cache_bytes=2 * state + 5)
    for seed in range(6):
        llm.generate([_prompt(70, seed)], greedy(1))
    found = llm.stats()["prefix_cache"]
    assert (found["states"], found["state_places"], found["state_bytes"]) == (2, 2, 2 * state)
    assert found["state_evictions"] == 4
    # Pages of the evicted are there, and worth nothing without their states.
    (old,) = llm.generate([_prompt(70, 0)], greedy(1))
    (new,) = llm.generate([_prompt(70, 5)], greedy(1))
    assert (old.cached_tokens, new.cached_tokens) == (0, 64)
    assert llm.stats()["prefix_cache"]["lost_to_state"] == 64


def test_sizes_that_cannot_be_are_refused_before_weights_are_read(mini_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_interval_tokens is 48; .* multiple of 64"):
        _build(mini_checkpoint, "auto", state_interval_tokens=48)
    with pytest.raises(ConfigError, match=r"state_cache_bytes is 10; one state .* takes 112,128"):
        _build(mini_checkpoint, "auto", state_cache_bytes=10)
    settings = {"state_cache_bytes": 10**6, "enable_prefix_caching": False}
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        _build(mini_checkpoint, "auto", **settings)


def test_a_cache_that_can_never_hit_says_so_once(
    mini_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kdecode"):
        llm = _build(mini_checkpoint, "auto", state_interval_tokens=320)
    (line,) = [r.getMessage() for r in caplog.records if "never hit" in r.getMessage()]
    assert "multiple of 320 tokens, and a prompt has at most 319" in line
    assert llm.stats()["prefix_cache"]["can_hit"] is False


def _mixed(count: int, draw: random.Random) -> list[list[int]]:
    """Prompts of which most begin like others, some are repeated, and some are short."""
    stems = [_prompt(200, seed) for seed in range(4)]
    prompts: list[list[int]] = []
    for _ in range(count):
        if prompts and draw.random() < 0.2:
            prompts.append(draw.choice(prompts))
        else:
            stem = draw.choice(stems)[: draw.choice((0, 1, 63, 64, 65, 128, 190))]
            prompts.append([*stem, *(draw.randrange(1000) for _ in range(draw.randint(1, 40)))])
    return prompts


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_hundred_requests_meet_no_poison_in_half_the_pages(
    mini_checkpoint: Path, backend: str
) -> None:
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    budget = 3 * slot_bytes(config) + 24 * page_bytes(config, 16, "bf16")
    llm = _build(mini_checkpoint, backend, cache_budget_bytes=budget)
    prompts = _mixed(200, random.Random(3))
    outputs: list[Output] = llm.generate(prompts, greedy(4))
    assert {(output.error, len(output.token_ids)) for output in outputs} == {(None, 4)}
    found = llm.stats()["prefix_cache"]
    assert found["hits"] > 0
    assert found["page_evictions"] > 0
    assert (llm.stats()["pages_used"], llm.stats()["slots_used"]) == (0, 0)
    llm.reset_prefix_cache()
    assert llm._worker.caches.page_pool.num_used == 0
