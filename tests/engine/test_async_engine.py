"""The engine behind a thread: many callers, aborts, steps that break, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdecode.engine.async_engine import AsyncEngine, EngineStoppedError, Job, RequestGroup
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, RequestError, SamplingParams

PROMPTS = [[1, 2, 3], [4], [7, 8, 9, 10, 11], [5, 6]]


@pytest.fixture(scope="module")
def llm(mini_checkpoint: Path) -> LLM:
    return LLM(mini_checkpoint, num_threads=1, max_context_tokens=256, max_requests=3)


@pytest.fixture(autouse=True)
def _nothing_held(llm: LLM) -> Iterator[None]:
    yield
    stats = llm.stats()
    names = ("waiting", "running", "pages_used", "slots_used")
    assert [stats[name] for name in names] == [0] * 4


def _greedy(max_tokens: int = 6, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


async def _collect(group: RequestGroup) -> list[Output]:
    texts = [""] * len(group.outputs)
    async for index, event in group.events():
        texts[index] += event.text
    outputs = [output for output in group.outputs if output is not None]
    assert texts == [output.text for output in outputs]
    return outputs


def test_callers_at_once_get_what_each_gets_alone(llm: LLM) -> None:
    alone = [llm.generate([prompt], _greedy())[0].token_ids for prompt in PROMPTS]

    async def main() -> list[list[Output]]:
        engine = AsyncEngine(llm)
        try:
            groups = [await engine.submit([Job(prompt, _greedy())]) for prompt in PROMPTS]
            return await asyncio.gather(*map(_collect, groups))
        finally:
            await engine.stop()

    assert [outputs[0].token_ids for outputs in asyncio.run(main())] == alone


def test_a_group_is_accepted_whole_or_not_at_all(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm)
        with pytest.raises(RequestError, match="max_context_tokens is 256"):
            await engine.submit([Job([1], _greedy(200)), Job([1], _greedy(1000))])
        assert llm.stats()["waiting"] + llm.stats()["running"] == 0
        assert len(await _collect(await engine.submit([Job([1], _greedy(2))]))) == 1
        await engine.stop()

    asyncio.run(main())


def test_an_abort_ends_one_job_and_frees_it(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm)
        group = await engine.submit([Job([1, 2], _greedy(200)), Job([3], _greedy(5))])
        async for index, _ in group.events():
            if index == 0:
                group.abort(0)
        assert group.outputs[0] is None
        assert len(group.outputs[1].token_ids) == 5  # type: ignore[union-attr]
        await engine.stop()

    asyncio.run(main())


def test_a_cancelled_submission_leaves_nothing(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm)
        task = asyncio.create_task(engine.submit([Job([1, 2], _greedy(200))]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Orders are carried out in turn, so this one is behind the abort.
        await _collect(await engine.submit([Job([1], _greedy(2))]))
        assert llm.stats()["running"] == 0
        await engine.stop()

    asyncio.run(main())


def test_a_step_that_breaks_ends_its_own_requests_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = llm.loop._worker.execute

    def broken(step: Any) -> Any:
        if any(share.request.prompt_ids == (13,) for share in step.shares):
            raise RuntimeError("a made-up fault")
        return execute(step)

    monkeypatch.setattr(llm.loop._worker, "execute", broken)

    async def main() -> list[Output]:
        engine = AsyncEngine(llm)
        bad = await engine.submit([Job([13], _greedy())])
        (failed,) = await _collect(bad)
        (served,) = await _collect(await engine.submit([Job([1, 2], _greedy())]))
        await engine.stop()
        return [failed, served]

    failed, served = asyncio.run(main())
    assert (failed.finish_reason, served.finish_reason) == ("error", "length")
    assert failed.error == "RuntimeError: a made-up fault"


def test_stopping_ends_open_requests_and_takes_no_more(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm)
        group = await engine.submit([Job([1, 2], _greedy(200))])
        await engine.stop()
        assert not engine.is_running
        with pytest.raises(EngineStoppedError, match="stopped"):
            await _collect(group)
        with pytest.raises(EngineStoppedError, match="stopped"):
            await engine.submit([Job([1], _greedy())])

    asyncio.run(main())


def test_a_fault_of_the_engine_is_told_to_everyone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("a made-up fault")

    deaths: list[bool] = []

    async def main() -> None:
        engine = AsyncEngine(llm, on_death=lambda: deaths.append(True))
        group = await engine.submit([Job([1, 2], _greedy(200))])
        monkeypatch.setattr(llm.loop.scheduler, "schedule", broken)
        with pytest.raises(EngineStoppedError, match="ValueError: a made-up fault"):
            await _collect(group)
        assert not engine.is_running
        await engine.stop()

    asyncio.run(main())
    assert deaths == [True]


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = _greedy(4, logprobs=3)
    (output,) = llm.generate([[1, 2, 3]], params)
    logits = llm.teacher_forced([1, 2, 3], output.token_ids).double().log_softmax(-1)
    assert len(output.logprobs) == 4
    for row, token, told in zip(logits, output.token_ids, output.logprobs, strict=True):
        assert told.top[0] == (token, told.logprob)
        assert told.logprob == pytest.approx(float(row[token]))
        assert [value for _, value in told.top] == pytest.approx(row.topk(3).values.tolist())
    with pytest.raises(RequestError, match="from 0 to 20"):
        _greedy(logprobs=21)
