"""Slots and pages from request to request: nothing of a former owner is ever seen.

Everything that is given back is filled with NaN at once, so that a state that is not cleared, a row
that is read beyond a length, or a page that is freed too early shows in a logit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.config import ModelConfig
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams
from kdecode.testing.compare import near_tie
from kdecode.testing.poison import poison_

BACKENDS = ("auto", "latency_specialized")
# Two correct runs may choose apart where logits are so close: 5 % of a large one, as in `compare`.
NEAR_TIE = 0.5
CACHES = (("bf16", None), ("fp8", 0.125))


def _build(checkpoint: Path, backend: str, **settings: object) -> LLM:
    defaults = {"num_threads": 1, "page_tokens": 16, "max_context_tokens": 64, "max_requests": 3}
    llm = LLM(checkpoint, decode_backend=backend, **{**defaults, **settings})
    _poison_what_is_free(llm)
    return llm


def _poison_what_is_free(llm: LLM) -> None:
    caches = llm._worker.caches
    slot_pools = [*caches.conv.values(), *caches.recurrent.values()]
    for pool, tensors in (
        (caches.slot_pool, slot_pools),
        (caches.page_pool, list(caches.pages.values())),
    ):
        for tensor in tensors:
            poison_(tensor)
        free = pool.free

        def give_back(
            places: Iterable[int],
            free=free,
            tensors=tensors,  # type: ignore[no-untyped-def]
        ) -> None:
            given = tuple(places)
            free(given)
            for tensor in tensors:
                for place in given:
                    poison_(tensor[place])

        pool.free = give_back  # type: ignore[method-assign]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize(("cache_dtype", "scale"), CACHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_hundred_requests_meet_no_poison(
    mini_checkpoint: Path, backend: str, cache_dtype: str, scale: float | None
) -> None:
    """Random prompts, prompts and chunks of one token among them, in three slots."""
    llm = _build(
        mini_checkpoint,
        backend,
        cache_dtype=cache_dtype,
        cache_scale=scale,
        # A prompt of 18 tokens is a chunk of 17 and one of a single token.
        max_step_tokens=17,
    )
    draw = random.Random(0)
    lengths = [draw.choice((1, 1, 2, 3, 15, 16, 17, 18, 35)) for _ in range(200)]
    prompts = [[draw.randrange(1000) for _ in range(length)] for length in lengths]
    outputs = llm.generate(prompts, _greedy(3))
    assert [output.error for output in outputs if output.error is not None] == []
    assert [len(output.token_ids) for output in outputs] == [3] * 200
    stats = llm.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)
    if backend == "latency_specialized":
        assert stats["coverage"] == 1.0


def _assert_chosen_alone(llm: LLM, outputs: Iterable[Output]) -> None:
    """Each token is what the request would have got alone, up to a near-tie."""
    for output in outputs:
        logits = llm.teacher_forced(output.prompt_ids, output.token_ids)
        for row, token in zip(logits, output.token_ids, strict=True):
            near_tie(row, token, NEAR_TIE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_requests_go_on_where_they_were(mini_checkpoint: Path, backend: str) -> None:
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    budget = 3 * slot_bytes(config) + 5 * page_bytes(config, 16, "bf16")
    llm = _build(mini_checkpoint, backend, cache_budget_bytes=budget)
    outputs = llm.generate([[i + 1] * 14 for i in range(3)], _greedy(24))
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [(output.error, len(output.token_ids)) for output in outputs] == [(None, 24)] * 3
    _assert_chosen_alone(llm, outputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broken_step_harms_nobody_else(
    mini_checkpoint: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a step has run when it breaks: its requests end, those that wait are served right."""
    llm = _build(mini_checkpoint, backend)
    runner = llm._worker.runner
    run, calls = runner.run, []

    def breaks_once(batch: object) -> torch.Tensor:
        logits = run(batch)  # type: ignore[arg-type]
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("the step broke after it had moved the caches")
        return logits

    monkeypatch.setattr(runner, "run", breaks_once)
    outputs = llm.generate([[i + 1, i + 2] for i in range(6)], _greedy(5))
    broken = [output for output in outputs if output.finish_reason == "error"]
    whole = [output for output in outputs if output.finish_reason == "length"]
    assert len(broken) == 3
    assert len(whole) == 3
    stats = llm.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)
    _assert_chosen_alone(llm, whole)
