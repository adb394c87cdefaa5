"""Many different requests at once, with aborts, stops, seeds and repeats.

And the check that each got what it gets alone.

Owns the plan of a run, made from a seed, and its judgement. Free memory is poisoned all the time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams
from kdecode.testing.compare import near_tie

# Of the largest logit, as in `kdecode compare`: two correct runs may choose apart below it.
NEAR_TIE = 0.05
# Tokens of a step that cut blocks of 64 tokens, each in its own way.
CUTS = (50, 33, 57, 40, 21, 63)


@dataclass(frozen=True)
class Planned:
    """abort_after: tokens after which it is given up; None to run it to its end."""

    prompt: tuple[int, ...]
    params: SamplingParams
    abort_after: int | None
    priority: int = 0


@dataclass
class Result:
    outputs: dict[int, Output] = field(default_factory=dict)
    num_aborted: int = 0
    near_ties: int = 0
    other_cuts: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


def plan(count: int, longest: int, longest_reply: int, seed: int) -> list[Planned]:
    """Lengths are spread evenly over their orders of magnitude, from 1 on."""
    draw = random.Random(seed)
    stems = [[draw.randrange(1000) for _ in range(longest)] for _ in range(6)]
    planned: list[Planned] = []
    for _ in range(count):
        kind = draw.random()
        if planned and kind < 0.1:
            planned.append(draw.choice(planned))
            continue
        length = max(1, round(longest ** draw.random()))
        shared = draw.choice((0, length // 2, length - 1)) if kind < 0.6 else 0
        prompt = draw.choice(stems)[:shared]
        prompt += [draw.randrange(1000) for _ in range(length - len(prompt))]
        settings: dict[str, Any] = {"max_tokens": draw.randint(1, longest_reply)}
        if draw.random() < 0.2:
            settings |= {"temperature": 0.8, "seed": draw.randrange(100), "top_p": 0.95}
        if draw.random() < 0.2:
            settings["stop"] = (draw.choice("aeiou") + draw.choice(" nrst"), "##")
        else:
            settings["ignore_eos"] = True
        abort_after = draw.randrange(3) if draw.random() < 0.15 else None
        params = SamplingParams(**settings)
        planned.append(Planned(tuple(prompt), params, abort_after, draw.choice((0, 0, 0, 1, -1))))
    return planned


def run(llm: LLM, planned: list[Planned], concurrency: int) -> Result:
    """Hands requests in as others end, so that so many are open all the time."""
    result, todo = Result(), list(enumerate(planned))[::-1]
    open_: dict[int, int] = {}
    loop = llm.loop
    while todo or open_:
        while todo and len(open_) < concurrency:
            index, job = todo.pop()
            open_[llm.add_request(job.prompt, job.params, priority=job.priority)] = index
            # Given up before any step has seen it.
            if job.abort_after == 0 and len(todo) % 2:
                _give_up(llm, open_, result, max(open_))
        for event in loop.step():
            if event.number not in open_:
                continue
            index = open_[event.number]
            if event.finish_reason is not None:
                result.outputs[index] = loop.collect(event.number)
                result.kinds[event.finish_reason] += 1
                del open_[event.number]
                continue
            after = planned[index].abort_after
            if after is not None and len(loop._requests[event.number].output_ids) >= after:
                _give_up(llm, open_, result, event.number)
    return result


def _give_up(llm: LLM, open_: dict[int, int], result: Result, number: int) -> None:
    llm.loop.drop(number)
    del open_[number]
    result.num_aborted += 1


class Alone:
    """What each request gets by itself, on an engine of its own without a prefix cache.

    build: an engine whose steps have at most so many tokens; None: its usual number.
    """

    def __init__(self, build: Callable[[int | None], LLM]) -> None:
        self.build = build
        self._llm = build(None)
        self._cut: dict[int, LLM] = {}
        self._replies: dict[tuple[tuple[int, ...], SamplingParams], Output] = {}

    def reply(self, job: Planned) -> Output:
        """Kept, because runs of one plan ask for the same ones."""
        key = job.prompt, job.params
        if key not in self._replies:
            (self._replies[key],) = self._llm.generate([job.prompt], job.params)
        return self._replies[key]

    def margins(self, job: Planned, ids: Sequence[int]) -> Iterator[float]:
        """How far the last of these tokens lies below the largest logit, as a share of that.

        First in the request's usual steps, then with its prompt cut elsewhere.
        """
        yield _margin(self._llm, job, ids)
        for tokens in CUTS:
            if tokens not in self._cut:
                self._cut[tokens] = self.build(tokens)
            yield _margin(self._cut[tokens], job, ids)


def _margin(llm: LLM, job: Planned, ids: Sequence[int]) -> float:
    logits = llm.teacher_forced(job.prompt, ids)[-1]
    return near_tie(logits, ids[-1], float("inf")) / float(logits.max())


def check(alone: Alone, planned: list[Planned], result: Result, *, every: int = 1) -> None:
    """Each greedy reply is one that its request can have alone.

    Where it parts from the usual one, its token is a near-tie there; or it is one where the prompt
    is cut elsewhere, which is as right: an expert that changes place at a tie moves logits by more
    than roundings do. every: only every so manieth request is compared.
    """
    for index, output, expected in _pairs(alone, planned, result, every):
        job = planned[index]
        if not job.params.is_greedy or _is_same(output, expected):
            continue
        both = zip(output.token_ids, expected.token_ids, strict=False)
        place = next(i for i, (a, b) in enumerate(both) if a != b)
        margins = []
        for margin in alone.margins(job, output.token_ids[: place + 1]):
            margins.append(margin)
            if margin <= NEAR_TIE:
                break
        assert margins[-1] <= NEAR_TIE, (index, place, output.token_ids[place], margins)
        result.near_ties += len(margins) == 1
        result.other_cuts += len(margins) > 1


def check_exact(alone: Alone, planned: list[Planned], result: Result, *, every: int = 1) -> None:
    """Each reply is the one that the request has alone, sampled ones too."""
    for index, output, expected in _pairs(alone, planned, result, every):
        assert _is_same(output, expected), (index, output.token_ids, expected.token_ids)


def _pairs(
    alone: Alone, planned: list[Planned], result: Result, every: int
) -> Iterator[tuple[int, Output, Output]]:
    for index, output in sorted(result.outputs.items()):
        assert output.error is None, (index, output.error)
        if index % every == 0:
            yield index, output, alone.reply(planned[index])


def _is_same(output: Output, expected: Output) -> bool:
    if output.token_ids != expected.token_ids:
        return False
    assert (output.text, output.finish_reason) == (expected.text, expected.finish_reason)
    return True


def assert_nothing_held(llm: LLM) -> None:
    stats, caches = llm.stats(), llm._worker.caches
    names = ("waiting", "running", "pages_used", "slots_used")
    assert [stats[name] for name in names] == [0] * 4
    llm.reset_prefix_cache()
    assert (caches.page_pool.num_used, caches.slot_pool.num_used) == (0, 0)
    assert not llm.loop._requests
