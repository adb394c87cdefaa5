"""Tasks put to two servers, graded in pairs.

Owns what is asked, how often and how many at a time, and what keeps grades from being given. Rules
of grading are `scorers`', statistics `paired`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kdecode.bench.compare import Progress
from kdecode.bench.quality.items import Item, Task
from kdecode.bench.quality.paired import (
    GradedReply,
    PairedGrades,
    Score,
    ScoreKey,
    pair,
    score,
)
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.facts import ServerFacts, read_facts
from kdecode.bench.serving.gate import facts_differences
from kdecode.bench.serving.http import HttpError
from kdecode.bench.verdicts import Difference
from kdecode.bench.workloads.types import Request

ENDPOINT = "/v1/chat/completions"


class NoGradesError(ValueError):
    """Servers whose replies are no answers of their models; the message says which."""


@dataclass(frozen=True)
class Asking:
    """How tasks are asked. repeats: replies to each item, each with a seed of its own."""

    max_tokens: int
    temperature: float = 0.0
    repeats: int = 1
    concurrency: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats > 1 and self.temperature == 0:
            raise ValueError("At temperature 0 every reply to an item is the same; ask once.")


@dataclass(frozen=True)
class TaskResult:
    """One task. Both arms have one key, or there would be no column for both."""

    key: ScoreKey
    scores: tuple[Score, Score]
    paired: PairedGrades
    replies: tuple[tuple[GradedReply, ...], tuple[GradedReply, ...]]


@dataclass(frozen=True)
class QualityComparison:
    """differences: of the configurations; they are told, and forbid nothing here."""

    arm_names: tuple[str, str]
    facts: tuple[ServerFacts, ServerFacts]
    differences: tuple[Difference, ...]
    results: tuple[TaskResult, ...]

    @property
    def differs(self) -> bool:
        return any(result.paired.differs for result in self.results)


async def compare_quality(
    client_a: Client,
    client_b: Client,
    tasks: Sequence[Task],
    asking: Asking,
    progress: Progress = lambda phase, detail: None,
) -> QualityComparison:
    """Raises HttpError, and NoGradesError for synthetic acceptance."""
    clients = [
        dataclasses.replace(client, ignore_eos=False, temperature=asking.temperature)
        for client in (client_a, client_b)
    ]
    facts = (await read_facts(clients[0]), await read_facts(clients[1]))
    for client, one in zip(clients, facts, strict=True):
        if one.study == "synthetic acceptance":
            raise NoGradesError(
                f"{client.name} accepts drafts at stated rates, whatever they are: its texts are "
                "no answers of the model, so there is nothing to grade."
            )
    results = []
    for task in tasks:
        replies = []
        for client, one in zip(clients, facts, strict=True):
            named = dataclasses.replace(client, model=one.model)
            replies.append(await _ask(named, task, asking, progress))
        key = ScoreKey(
            task.name, task.version, ENDPOINT, asking.max_tokens, asking.temperature, asking.repeats
        )
        results.append(
            TaskResult(
                key=key,
                scores=(score(replies[0]), score(replies[1])),
                paired=pair(
                    replies[0], replies[1], in_steps=task.is_graded_in_steps, seed=asking.seed
                ),
                replies=(tuple(replies[0]), tuple(replies[1])),
            )
        )
    return QualityComparison(
        arm_names=(client_a.name, client_b.name),
        facts=facts,
        differences=facts_differences(*facts),
        results=tuple(results),
    )


async def _ask(client: Client, task: Task, asking: Asking, progress: Progress) -> list[GradedReply]:
    """All items, as often as asked for; raises HttpError for the first that gets no reply."""
    todo = [(item, repeat) for item in task.items for repeat in range(asking.repeats)]
    graded: dict[tuple[str, int], GradedReply] = {}
    queue = iter(todo)

    async def worker() -> None:
        for item, repeat in queue:
            graded[(item.id, repeat)] = await _grade(client, item, repeat, asking)
            progress(f"{task.name}, {client.name}", f"reply {len(graded)} of {len(todo)}")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(asking.concurrency, len(todo))):
                group.create_task(worker())
    except ExceptionGroup as errors:
        # One is enough to say why there are no grades.
        raise errors.exceptions[0] from None
    return [graded[(item.id, repeat)] for item, repeat in todo]


async def _grade(client: Client, item: Item, repeat: int, asking: Asking) -> GradedReply:
    seeded = dataclasses.replace(client, seed=asking.seed + repeat)
    request = Request(f"{item.id}/{repeat}", asking.max_tokens, messages=item.messages)
    record = await seeded.send(request)
    if record.reply is None:
        raise HttpError(f"{client.name} gives no reply to {item.id}: {record.error}")
    if not record.reply.outputs_valid:
        raise NoGradesError(f"{client.name} says that its replies are no answers of its model.")
    return GradedReply(
        item=item.id,
        repeat=repeat,
        # Reasoning is not the answer; a reply of nothing else has none.
        grade=item.grade(record.reply.content),
        is_truncated=record.reply.is_truncated,
        output_tokens=record.reply.output_tokens,
    )


def render(comparison: QualityComparison) -> str:
    """The report for a terminal: a section for each key of scores."""
    lines = []
    for name, facts in zip(comparison.arm_names, comparison.facts, strict=True):
        lines.append(f"{name}: {facts.kind}, model {facts.model}")
    for difference in comparison.differences:
        first, second = difference.values
        lines.append(f"  the arms differ in {difference.setting}: {first!r} | {second!r}")
    for result in comparison.results:
        lines += ["", f"{result.key}", *_result_lines(comparison.arm_names, result)]
    word = "differ" if comparison.differs else "no difference seen at this size"
    return "\n".join([*lines, "", f"grades: {word}"]) + "\n"


def _result_lines(names: tuple[str, str], result: TaskResult) -> list[str]:
    lines = [
        f"  {name}: {100 * one.mean:.1f} +- {100 * one.error:.1f} of 100 over {one.items} items; "
        f"{one.truncated} of {one.replies} replies were cut by the limit"
        for name, one in zip(names, result.scores, strict=True)
    ]
    paired = result.paired
    lines.append(
        f"  {names[1]} less {names[0]}: {100 * paired.difference:+.1f}, 95 % interval "
        f"[{100 * paired.low:+.1f}, {100 * paired.high:+.1f}] over items"
    )
    if paired.only_a is None:
        lines.append(f"  sign test of {paired.pairs} pairs: p = {paired.p_value:.3g}")
    else:
        lines.append(
            f"  right in {names[0]} alone: {paired.only_a}, in {names[1]} alone: {paired.only_b}, "
            f"of {paired.pairs} pairs; McNemar's exact test: p = {paired.p_value:.3g}"
        )
    if result.scores[0].truncated != result.scores[1].truncated:
        lines.append("  the arms were cut differently often: the limit may be what is measured")
    return lines
