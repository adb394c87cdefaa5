"""The paired comparison of two servers: what is run, in which order, and what is made of it.

Owns: null run, warm-up, blocks, the state of the caches, pairs. Formulas are in `bench.metrics` and
`summary`, intervals in `bench.statistics`, rules in `gate` and `bench.verdicts`. The first arm is
the baseline and the reference of the outputs; a ratio above 1 means that the second is faster.
"""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kdecode.bench.agreement import Agreement
from kdecode.bench.compare import Progress, Warmup
from kdecode.bench.serving import gate
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.counters import Key, add_up, growth
from kdecode.bench.serving.facts import ServerFacts, read_facts, read_metrics
from kdecode.bench.serving.forced import Calibration, ForcedChoices, calibrate, force
from kdecode.bench.serving.http import HttpError, exchange
from kdecode.bench.serving.load import Load, PassResult, run_pass
from kdecode.bench.serving.outputs import Judged, judge
from kdecode.bench.serving.reply import Reply
from kdecode.bench.serving.summary import Limits, ServedSummary, summarize_passes
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.verdicts import (
    EXIT_CODES,
    Difference,
    Pairs,
    Verdict,
    is_not_exercised,
    ratios,
    speed_verdict,
    unequal_pairs,
)
from kdecode.bench.workloads.types import Request, Workload

# How the caches of both arms are brought into one state: requests of every pass are salted, so that
# they find nothing of an earlier one; or the server drops its prefixes before a pass; or neither.
CacheState = Literal["salt", "reset", "as is"]


@dataclass(frozen=True)
class Design:
    """A block is four passes of the workload: ABBA, the next time BAAB, or in a random order.

    has_null: the first arm is measured against itself before. near_tie: of outputs, in natural
    logarithms; None: as the first arm's own roundings say. warmup_passes: least and most discarded
    passes of an arm, with other contents.
    """

    load: Load
    blocks: int = 6
    has_null: bool = True
    order: Literal["abba", "random"] = "abba"
    cache: CacheState = "salt"
    warmup_passes: tuple[int, int] = (3, 10)
    warmup_tolerance: float = 0.05
    warmup_requests: int = 4
    near_tie: float | None = 0.5
    limits: Limits = field(default_factory=Limits)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 2:
            raise ValueError(f"blocks is {self.blocks}; an interval needs at least 2.")


@dataclass(frozen=True)
class MeasuredPass:
    """One pass that counts. arm: 0 or 1. The i-th pass of each arm in a block are pairs."""

    block: int
    pair: int
    arm: int
    result: PassResult


@dataclass(frozen=True)
class Outputs:
    """judged: the greedy replies, with the near-tie that they were judged by. calibration, forced:
    of the prompts' paths, which decide nothing; None where a server does not tell."""

    judged: Judged
    near_tie: float
    calibration: Calibration | None
    forced: ForcedChoices | None

    @property
    def agreement(self) -> Agreement:
        return self.judged.agreement


@dataclass(frozen=True)
class ServedComparison:
    """Everything that a comparison found. ratios is empty unless the verdict is about speed."""

    comparison_id: str
    design: Design
    workload: Workload
    arm_names: tuple[str, str]
    urls: tuple[str, str]
    facts: tuple[ServerFacts, ServerFacts]
    differences: tuple[Difference, ...]
    problems: tuple[str, ...]
    warmups: tuple[Warmup, Warmup]
    null: RatioEstimate | None
    passes: tuple[MeasuredPass, ...]
    summaries: tuple[ServedSummary, ServedSummary]
    outputs: Outputs | None
    unequal_pairs: int
    ratios: Mapping[str, RatioEstimate]
    verdict: Verdict

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def is_synthetic(self) -> bool:
        return any(facts.study == "synthetic acceptance" for facts in self.facts)

    @property
    def outputs_valid(self) -> bool:
        """Whether replies are answers of the model, which evaluations of quality need."""
        return not self.is_synthetic and all(
            reply.outputs_valid
            for one in self.passes
            for record in one.result.records
            if (reply := record.reply) is not None
        )


async def compare_servers(
    client_a: Client,
    client_b: Client,
    workload: Workload,
    design: Design,
    progress: Progress = lambda phase, detail: None,
) -> ServedComparison:
    """Measures both servers. Raises HttpError when one of them cannot be asked at all."""
    clients = (client_a, client_b)
    facts = (await read_facts(client_a), await read_facts(client_b))
    clients = (
        dataclasses.replace(client_a, model=facts[0].model),
        dataclasses.replace(client_b, model=facts[1].model),
    )
    names = (client_a.name, client_b.name)
    runner = _Runner(workload, design, progress, uuid.uuid4().hex[:12])
    problems = [*gate.configuration_problems(names, facts)]
    if workload.reply_mode == "live":
        problems.append("Live replies make other prompts in each arm, which are no pairs.")
    null = None
    warmups = (await runner.warm_up(clients[0]), await runner.warm_up(clients[1]))
    if design.has_null:
        null = await runner.null(clients[0])
        if null is not None and (problem := gate.null_problem(names[0], null)):
            problems.append(problem)
    passes, growths = await runner.blocks(clients, "block")
    summaries = (
        runner.summary(passes, growths, 0),
        runner.summary(passes, growths, 1),
    )
    problems += gate.run_problems(names, facts, summaries)
    differences = gate.facts_differences(*facts)
    # Where drafts are accepted at stated rates, there are no answers to compare.
    outputs = None
    has_answers = all(one.study != "synthetic acceptance" for one in facts)
    if not differences and not problems and has_answers:
        outputs, problem = await runner.outputs(clients, passes)
        problems += [problem] if problem else []
    pairs = pairs_of(passes)
    verdict, found = _judge(facts, differences, problems, outputs, summaries, pairs, design.seed)
    return ServedComparison(
        comparison_id=runner.comparison_id,
        design=design,
        workload=workload,
        arm_names=names,
        urls=(_url(client_a), _url(client_b)),
        facts=facts,
        differences=differences,
        problems=tuple(problems),
        warmups=warmups,
        null=null,
        passes=tuple(passes),
        summaries=summaries,
        outputs=outputs,
        unequal_pairs=unequal_pairs(pairs),
        ratios=found,
        verdict=verdict,
    )


def _url(client: Client) -> str:
    return f"{client.target.scheme}://{client.target.authority}{client.target.base}"


def _judge(
    facts: Sequence[ServerFacts],
    differences: Sequence[Difference],
    problems: Sequence[str],
    outputs: Outputs | None,
    summaries: Sequence[ServedSummary],
    pairs: Pairs,
    seed: int,
) -> tuple[Verdict, dict[str, RatioEstimate]]:
    """The gravest reason first."""
    if differences or problems:
        return "not comparable", {}
    if outputs is not None and not outputs.agreement.agrees:
        return "outputs differ", {}
    coverages = [summary.counts.coverage for summary in summaries]
    if any(is_not_exercised(f.config, c) for f, c in zip(facts, coverages, strict=True)):
        return "not exercised", {}
    found = ratios(pairs, seed)
    return speed_verdict(found["tpot"]), found


def block_orders(design: Design) -> list[list[int]]:
    """The arms of each block's passes, in their order."""
    shuffler, found = random.Random(design.seed), []
    for block in range(design.blocks):
        order = [0, 1, 1, 0] if block % 2 == 0 else [1, 0, 0, 1]
        if design.order == "random":
            shuffler.shuffle(order)
        found.append(order)
    return found


def pairs_of(passes: Sequence[MeasuredPass]) -> Pairs:
    """Both arms' metrics of the same request in the same pair of passes, block by block."""
    halves: dict[tuple[int, int, str], dict[int, Any]] = {}
    for one in passes:
        for record in one.result.records:
            metrics = record.metrics()
            if metrics is not None:
                key = (one.block, one.pair, record.request_id)
                halves.setdefault(key, {})[one.arm] = metrics
    blocks: dict[int, list[Any]] = {one.block: [] for one in passes}
    for (block, _, _), half in sorted(halves.items()):
        if len(half) == 2:
            blocks[block].append((half[0], half[1]))
    return [blocks[block] for block in sorted(blocks)]


class _Runner:
    """Runs passes of one comparison."""

    def __init__(
        self, workload: Workload, design: Design, progress: Progress, comparison_id: str
    ) -> None:
        self.comparison_id = comparison_id
        self._workload = workload
        self._design = design
        self._progress = progress
        # Requests in flight while the load is complete; of an open loop, no number is known.
        self._concurrency = min(design.load.concurrency or 1, len(workload.sessions()))

    async def warm_up(self, client: Client) -> Warmup:
        """Passes of other contents and the same shapes, until their time per token is stable."""
        requests = sorted(self._workload.requests, key=_size, reverse=True)
        few = [_other(request) for request in requests[: self._design.warmup_requests]]
        workload = Workload("warm-up", tuple(few))
        load = Load(concurrency=min(self._concurrency, len(few)))
        least, most = self._design.warmup_passes
        times: list[float] = []
        while len(times) < most:
            detail = f"pass {len(times) + 1} of {least} to {most}"
            self._progress(f"warm-up {client.name}", detail)
            await self._prepare(client)
            found = await run_pass(client, workload, load, self._salt("warm-up", len(times)))
            done = [m for record in found.records if (m := record.metrics()) is not None]
            if not done:
                error = next(record.error for record in found.records)
                raise HttpError(f"{client.name} answers no request of the warm-up: {error}")
            values = sorted(m.e2e_s if m.tpot_s is None else m.tpot_s for m in done)
            times.append(values[len(values) // 2])
            last = times[-3:]
            is_stable = max(last) <= min(last) * (1 + self._design.warmup_tolerance)
            if len(times) >= least and len(last) == 3 and is_stable:
                return Warmup(len(times), is_stable=True)
        return Warmup(len(times), is_stable=False)

    async def null(self, client: Client) -> RatioEstimate | None:
        """The server against itself, by the same design; None where no ratio is defined."""
        passes, _ = await self.blocks((client, client), "null block")
        try:
            return ratios(pairs_of(passes), self._design.seed)["tpot"]
        except ValueError:
            return None

    async def blocks(
        self, clients: tuple[Client, Client], what: str
    ) -> tuple[list[MeasuredPass], list[tuple[int, dict[Key, float]]]]:
        """All passes in their order, and by how much each arm's counters grew in each."""
        design = self._design
        passes, growths = [], []
        for block, order in enumerate(block_orders(design)):
            done = [0, 0]
            for place, arm in enumerate(order):
                self._progress(f"{what} {block + 1} of {design.blocks}", f"pass {place + 1} of 4")
                client = clients[arm]
                await self._prepare(client)
                before = await read_metrics(client)
                # With the arm: both may be one server.
                salt = self._salt(what, block, done[arm], arm)
                result = await run_pass(client, self._workload, design.load, salt)
                growths.append((arm, growth(before, await read_metrics(client))))
                passes.append(MeasuredPass(block, done[arm], arm, result))
                done[arm] += 1
        return passes, growths

    def summary(
        self,
        passes: Sequence[MeasuredPass],
        growths: Sequence[tuple[int, dict[Key, float]]],
        arm: int,
    ) -> ServedSummary:
        counts = add_up([grown for which, grown in growths if which == arm])
        results = [one.result for one in passes if one.arm == arm]
        return summarize_passes(results, counts, self._design.limits, self._concurrency)

    async def outputs(
        self, clients: tuple[Client, Client], passes: Sequence[MeasuredPass]
    ) -> tuple[Outputs | None, str | None]:
        """Greedy replies one at a time, with logprobs where the server gives them."""
        replies: tuple[list[Reply], list[Reply]] = ([], [])
        for number, request in enumerate(self._workload.requests):
            detail = f"request {number + 1} of {len(self._workload.requests)}"
            self._progress("agreement", detail)
            for arm, client in enumerate(clients):
                salt = self._salt("agreement", number, arm)
                record = await client.send(request, salt=salt, has_logprobs=True)
                if record.reply is None:
                    record = await client.send(request, salt=salt)
                if record.reply is None:
                    return None, f"{client.name}: no reply to compare: {record.error}"
                replies[arm].append(record.reply)
        # A turn that finds its session in the caches may be computed in other chunks than alone.
        has_turns = len(self._workload.sessions()) < len(self._workload.requests)
        is_sequential = self._design.load.concurrency == 1 and not has_turns
        timed = (self._texts(passes, 0), self._texts(passes, 1))
        pairs = list(zip(self._workload.requests, replies[0], strict=True))
        self._progress("agreement", "the prompt's path")
        calibration = await calibrate(clients[0], pairs, self._salt("score", 0))
        near_tie = self._design.near_tie
        if near_tie is None:
            if calibration is None:
                return None, (
                    f"{clients[0].name} does not tell logprobs of prompts by token id, so a "
                    "near-tie cannot be calibrated; name one in ln p."
                )
            near_tie = calibration.near_tie
        forced = await force(clients[1], pairs, near_tie, self._salt("score", 1))
        judged = judge(*replies, timed, near_tie=near_tie, is_sequential=is_sequential)
        return Outputs(judged, near_tie, calibration, forced), None

    def _texts(self, passes: Sequence[MeasuredPass], arm: int) -> list[list[str]]:
        texts: dict[str, list[str]] = {request.id: [] for request in self._workload.requests}
        for one in passes:
            for record in one.result.records:
                if one.arm == arm and record.reply is not None:
                    texts[record.request_id].append(record.reply.text)
        return [texts[request.id] for request in self._workload.requests]

    def _salt(self, *place: object) -> str | None:
        """Another one for every pass, so that it finds nothing of those before."""
        if self._design.cache != "salt":
            return None
        return "-".join(map(str, (self.comparison_id, *place)))

    async def _prepare(self, client: Client) -> None:
        if self._design.cache != "reset":
            return
        found = await exchange(
            client.target, "POST", "/reset_prefix_cache", headers=client.headers, timeout_s=60
        )
        if found.status != 200:
            raise HttpError(
                f"{client.name} cannot drop its prefixes: POST /reset_prefix_cache: status "
                f"{found.status}; requests can be salted instead."
            )


def _size(request: Request) -> int:
    parts = request.prompt_ids or request.prompt or str(request.messages)
    return len(parts) + request.max_tokens


def _other(request: Request) -> Request:
    """Another request of the same shape: measured texts are never warmed up with."""
    if request.prompt_ids is not None:
        changed = dataclasses.replace(request, prompt_ids=request.prompt_ids[::-1])
    elif request.prompt is not None:
        changed = dataclasses.replace(request, prompt=request.prompt[::-1])
    else:
        messages = tuple(_backwards(message) for message in request.messages or ())
        changed = dataclasses.replace(request, messages=messages)
    return dataclasses.replace(changed, session="", turn=0, at_s=None, delay_s=0.0)


def _backwards(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": content[::-1]} if isinstance(content, str) else message
