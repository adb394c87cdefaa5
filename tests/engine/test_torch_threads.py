"""torch's thread count belongs to the process that embeds the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kdecode.engine import worker
from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
OWN_THREADS = 3


@pytest.fixture
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(OWN_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["auto", "latency_specialized"])
def llm(request: pytest.FixtureRequest, mini_checkpoint: Path) -> LLM:
    return LLM(mini_checkpoint, decode_backend=request.param, num_threads=1, max_requests=1)


@pytest.mark.usefixtures("_own_threads")
def test_the_callers_count_is_there_after_and_between_steps(llm: LLM) -> None:
    seen: list[int] = []
    llm.generate(["a"], PARAMS, on_token=lambda token: seen.append(torch.get_num_threads()))
    assert torch.get_num_threads() == OWN_THREADS
    for _ in llm.stream("a", PARAMS):
        seen.append(torch.get_num_threads())
    seen += [torch.get_num_threads() for _ in llm.follow_reply([1, 2], [3, 4])]
    llm.chat([{"role": "user", "content": "a"}], PARAMS)
    llm.inspect_decode(1, 4, 1)
    assert torch.get_num_threads() == OWN_THREADS
    assert seen == [OWN_THREADS] * (3 + 3 + 2)


@pytest.mark.usefixtures("_own_threads")
def test_steps_run_with_the_engines_count(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would hold for an engine that sets nothing."""
    seen: list[int] = []
    choose = worker.choose

    def spy(*args: object) -> object:
        seen.append(torch.get_num_threads())
        return choose(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "choose", spy)
    llm.generate(["a"], PARAMS)
    assert seen == [1, 1, 1]


@pytest.mark.usefixtures("_own_threads")
def test_a_step_that_breaks_gives_it_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(worker, "choose", breaks)
    (output,) = llm.generate(["a"], PARAMS)
    assert output.finish_reason == "error"
    assert torch.get_num_threads() == OWN_THREADS
