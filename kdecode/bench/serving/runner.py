"""What a comparison of two servers runs: warm-up, passes in blocks, the replies that are judged.

Owns the state of the caches before a pass, and that nothing of a measured request is warmed up
with. What is made of it is `protocol`'s.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from kdecode.bench.compare import Progress, Warmup
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.counters import Key, add_up, growth
from kdecode.bench.serving.design import Design, MeasuredPass, Outputs, block_orders, pairs_of
from kdecode.bench.serving.facts import ServerFacts, read_facts, read_metrics
from kdecode.bench.serving.forced import calibrate, force
from kdecode.bench.serving.gate import facts_differences
from kdecode.bench.serving.hosting import Hosts
from kdecode.bench.serving.http import HttpError, exchange
from kdecode.bench.serving.load import Load, run_pass
from kdecode.bench.serving.outputs import judge
from kdecode.bench.serving.reply import Reply
from kdecode.bench.serving.summary import ServedSummary, summarize_passes
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.verdicts import COMPARED_SETTING, ratios
from kdecode.bench.workloads.types import Request, Workload


class Runner:
    """Runs passes of one comparison."""

    def __init__(
        self, workload: Workload, design: Design, progress: Progress, hosts: Hosts
    ) -> None:
        self.comparison_id = uuid.uuid4().hex[:12]
        self._workload = workload
        self._design = design
        self._progress = progress
        self._hosts = hosts
        # Each server, and what it resolved when it was first asked.
        self._clients: list[Client] = []
        self._facts: list[ServerFacts] = []
        # Requests in flight while the load is complete; of an open loop, no number is known.
        self._concurrency = min(design.load.concurrency or 1, len(workload.sessions()))

    async def begin(
        self, clients: tuple[Client, Client]
    ) -> tuple[tuple[Client, Client], tuple[ServerFacts, ServerFacts], tuple[Warmup, Warmup]]:
        """Both servers' facts, clients that name their models, and the first warm-up of each."""
        warmups = []
        for arm, client in enumerate(clients):
            await self._hosts.turn(arm, arm)
            self._facts.append(await read_facts(client))
            self._clients.append(dataclasses.replace(client, model=self._facts[arm].model))
            warmups.append(await self.warm_up(self._clients[arm]))
        a, b = self._clients
        return (a, b), (self._facts[0], self._facts[1]), (warmups[0], warmups[1])

    async def _turn(self, server: int, role: int, *, begins_block: bool = False) -> None:
        """Makes sure that the server runs, and runs as it did; one that is new is warmed up."""
        for number in await self._hosts.turn(server, role, begins_block=begins_block):
            client = self._clients[number]
            now, before = await read_facts(client), self._facts[number]
            changed = facts_differences(before, now)
            if changed or now.config.get(COMPARED_SETTING) != before.config.get(COMPARED_SETTING):
                told = ", ".join(f"{d.setting}: {d.values[0]!r} | {d.values[1]!r}" for d in changed)
                raise HttpError(
                    f"{client.name} was started anew and resolved another configuration: "
                    f"{told or COMPARED_SETTING}."
                )
            await self.warm_up(client)

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
        passes, _ = await self.blocks((client, client), "null block", servers=(0, 0))
        try:
            return ratios(pairs_of(passes), self._design.seed)["tpot"]
        except ValueError:
            return None

    async def blocks(
        self, clients: tuple[Client, Client], what: str, servers: tuple[int, int] = (0, 1)
    ) -> tuple[list[MeasuredPass], list[tuple[int, dict[Key, float]]]]:
        """All passes in their order, and by how much each arm's counters grew in each.

        servers: which of them plays each arm.
        """
        design = self._design
        passes, growths = [], []
        for block, order in enumerate(block_orders(design)):
            done = [0, 0]
            for place, arm in enumerate(order):
                self._progress(f"{what} {block + 1} of {design.blocks}", f"pass {place + 1} of 4")
                client = clients[arm]
                begins = place == 0
                await self._turn(servers[arm], arm, begins_block=begins)
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
        await self._turn(0, 0)
        first, problem = await self._replies(clients[0], 0)
        if first is None:
            return None, problem
        pairs = list(zip(self._workload.requests, first, strict=True))
        calibration = await calibrate(clients[0], pairs, self._salt("score", 0))
        near_tie = self._design.near_tie
        if near_tie is None:
            if calibration is None:
                return None, (
                    f"{clients[0].name} does not tell logprobs of prompts by token id, so a "
                    "near-tie cannot be calibrated; name one in ln p."
                )
            near_tie = calibration.near_tie
        await self._turn(1, 1)
        second, problem = await self._replies(clients[1], 1)
        if second is None:
            return None, problem
        forced = await force(clients[1], pairs, near_tie, self._salt("score", 1))
        # A turn that finds its session in the caches may be computed in other chunks than alone.
        has_turns = len(self._workload.sessions()) < len(self._workload.requests)
        is_sequential = self._design.load.concurrency == 1 and not has_turns
        timed = (self._texts(passes, 0), self._texts(passes, 1))
        judged = judge(first, second, timed, near_tie=near_tie, is_sequential=is_sequential)
        return Outputs(judged, near_tie, calibration, forced), None

    async def _replies(self, client: Client, arm: int) -> tuple[list[Reply] | None, str | None]:
        """To every request, alone; or why there is none to one of them."""
        replies = []
        for number, request in enumerate(self._workload.requests):
            detail = f"request {number + 1} of {len(self._workload.requests)}"
            self._progress(f"agreement {client.name}", detail)
            salt = self._salt("agreement", number, arm)
            record = await client.send(request, salt=salt, has_logprobs=True)
            if record.reply is None:
                record = await client.send(request, salt=salt)
            if record.reply is None:
                return None, f"{client.name}: no reply to compare: {record.error}"
            replies.append(record.reply)
        return replies, None

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
