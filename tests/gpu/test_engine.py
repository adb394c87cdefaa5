"""Whole engines on a GPU: graphs that are replayed, and the same answers as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams

pytestmark = pytest.mark.gpu

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
REPLY = [20, 21, 22, 23, 24, 25]
BACKENDS = ("auto", "latency_specialized")


def _build(checkpoint: Path, device: str, backend: str, **settings: Any) -> LLM:
    defaults = {"page_tokens": 16, "max_context_tokens": 256, "max_requests": 8}
    return LLM(checkpoint, device=device, decode_backend=backend, **{**defaults, **settings})


def _rms_ratio(llm: LLM, host: LLM) -> float:
    """How far an engine's logits of a forced reply are from the CPU's: RMS error over RMS."""
    ours, theirs = (engine.teacher_forced(PROMPT, REPLY).cpu().double() for engine in (llm, host))
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())


@pytest.fixture(scope="module")
def engines(mini_checkpoint: Path) -> dict[str, LLM]:
    return {backend: _build(mini_checkpoint, "cuda", backend) for backend in BACKENDS}


@pytest.fixture(scope="module")
def host(mini_checkpoint: Path) -> LLM:
    return _build(mini_checkpoint, "cpu", "auto")


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_the_cpu(engines: dict[str, LLM], host: LLM, backend: str) -> None:
    assert _rms_ratio(engines[backend], host) <= 0.03


@pytest.mark.parametrize("backend", BACKENDS)
def test_replies_in_a_batch_are_those_alone(engines: dict[str, LLM], backend: str) -> None:
    """Slots, pages and positions change from replay to replay, and so do the rows of a step."""
    llm = engines[backend]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[3 * n + 1, n + 2, 7] for n in range(3)]
    together = llm.generate(prompts, greedy)
    again = llm.generate(prompts[::-1], greedy)[::-1]
    assert [o.token_ids for o in together] == [o.token_ids for o in again]
    assert len({o.token_ids for o in together}) > 1


def test_decode_steps_run_the_specialised_plans(engines: dict[str, LLM]) -> None:
    greedy = SamplingParams(max_tokens=5, ignore_eos=True)
    for output in engines["latency_specialized"].generate([PROMPT, REPLY], greedy):
        assert set(output.decode_steps) == {("specialized", "")}


def test_a_step_is_as_many_nodes_of_a_graph_as_its_plan_has_launches(
    engines: dict[str, LLM],
) -> None:
    llm = engines["latency_specialized"]
    for rows in (1, 8):
        cost = llm.inspect_decode(rows, 64, runs=3)
        assert cost.timed_as == "timed as replays of a CUDA graph"
        expected = [len(step.prepared.launches) for step in llm.decode_plan(rows).steps]
        assert [step.launches for step in cost.steps] == expected
        assert 0 < cost.plan_microseconds < 100_000


def test_an_fp8_cache_decodes(mini_checkpoint: Path, host: LLM) -> None:
    llm = _build(
        mini_checkpoint, "cuda", "latency_specialized", cache_dtype="fp8", cache_scale=0.05
    )
    assert _rms_ratio(llm, host) <= 0.08
