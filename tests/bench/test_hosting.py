"""Servers that a comparison starts anew: when, and that they are what they were."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mock_server import MockServer
from simulated import simulate
from test_serving_protocol import MACHINE, WORKLOAD, auto, design, special

from kdecode import cli
from kdecode.bench.serving import hosting
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.design import Restart
from kdecode.bench.serving.hosting import Launched
from kdecode.bench.serving.http import HttpError, Target
from kdecode.bench.serving.launch import Launch
from kdecode.bench.serving.plan import Expected, phases
from kdecode.bench.serving.protocol import ServedComparison, compare_servers
from kdecode.bench.serving.report import render

LAUNCHES = (Launch("a", ["x"], "http://auto:1"), Launch("b", ["y"], "http://special:1"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and ended, in the order of that."""
    found: list[str] = []

    @asynccontextmanager
    async def launched(launch: Launch) -> AsyncIterator[None]:
        found.append(f"+{launch.name}")
        yield
        found.append(f"-{launch.name}")

    monkeypatch.setattr(hosting, "launched", launched)
    return found


async def block(hosts: Launched, order: Sequence[int], servers: tuple[int, int] = (0, 1)) -> None:
    for place, arm in enumerate(order):
        await hosts.turn(servers[arm], arm, begins_block=place == 0)


def turns(restart: Restart, *orders: tuple[Sequence[int], tuple[int, int]]) -> None:
    async def main() -> None:
        async with Launched(LAUNCHES, restart) as hosts:
            for order, servers in orders:
                await block(hosts, order, servers)

    asyncio.run(main())


ABBA, BAAB = [0, 1, 1, 0], [1, 0, 0, 1]


def test_both_stay(log: list[str]) -> None:
    turns("never", (ABBA, (0, 1)), (BAAB, (0, 1)))
    assert log == ["+a", "+b", "-b", "-a"]


def test_both_are_new_for_each_block(log: list[str]) -> None:
    turns("block", (ABBA, (0, 1)), (BAAB, (0, 1)))
    assert log == ["+a", "+b", "-b", "-a"] * 2


def test_one_at_a_time(log: list[str]) -> None:
    turns("arm", (ABBA, (0, 1)), (BAAB, (0, 1)))
    assert log == ["+a", "-a", "+b", "-b"] * 3
    log.clear()
    # A null run sees what one process has against the next.
    turns("arm", (ABBA, (0, 0)))
    assert log == ["+a", "-a"] * 3
    log.clear()
    # The server that played b in the null run makes room for b itself.
    turns("arm", (BAAB, (0, 0)), (BAAB, (0, 1)))
    assert log == ["+a", "-a"] * 3 + ["+b", "-b", "+a", "-a", "+b", "-b"]


def test_what_was_started_ends_where_the_next_does_not_start(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = hosting.launched

    @asynccontextmanager
    async def failing(launch: Launch) -> AsyncIterator[None]:
        if launch.name == "b":
            raise OSError("no")
        async with start(launch):
            yield

    monkeypatch.setattr(hosting, "launched", failing)
    with pytest.raises(OSError, match="no"):
        turns("never", (ABBA, (0, 1)))
    assert log == ["+a", "-a"]


@pytest.mark.parametrize("restart", ["never", "block", "arm"])
@pytest.mark.parametrize("order", ["abba", "random"])
@pytest.mark.parametrize("has_null", [False, True])
def test_a_plan_has_the_warm_ups_of_new_servers(
    log: list[str], tmp_path: Path, restart: Restart, order: Any, has_null: bool
) -> None:
    chosen = design(restart=restart, order=order, has_null=has_null, blocks=3)
    a, b = auto(), special()

    async def main() -> None:
        async with a.running() as url_a, b.running() as url_b:
            clients = [Client(n, Target.from_url(u)) for n, u in (("a", url_a), ("b", url_b))]
            async with Launched(LAUNCHES, restart) as hosts:
                await compare_servers(clients[0], clients[1], WORKLOAD, chosen, hosts=hosts)

    simulate(tmp_path, main())
    planned = phases(WORKLOAD, chosen, Expected(0.2, 0.013))
    for arm, server in enumerate((a, b)):
        assert len(server.log) == sum(phase.passes[arm][0] * phase.requests for phase in planned)
    assert restart == "never" or len(log) > 4


class Changing:
    """Says that servers are new, and changes one of them."""

    def __init__(self, change: Any = None) -> None:
        self.asked: list[tuple[int, int, bool]] = []
        self._change = change

    async def turn(self, server: int, role: int, *, begins_block: bool = False) -> Sequence[int]:
        self.asked.append((server, role, begins_block))
        if not begins_block:
            return ()
        if self._change is not None:
            self._change()
        return (0, 1)


def run(folder: Path, a: MockServer, b: MockServer, hosts: Changing) -> ServedComparison:
    async def main() -> ServedComparison:
        async with a.running() as url_a, b.running() as url_b:
            clients = [Client(n, Target.from_url(u)) for n, u in (("a", url_a), ("b", url_b))]
            chosen = dataclasses.replace(design(), restart="block")
            return await compare_servers(clients[0], clients[1], WORKLOAD, chosen, hosts=hosts)

    found: ServedComparison = simulate(folder, main())
    return found


def test_a_new_server_is_warmed_up_before_its_passes(tmp_path: Path) -> None:
    a, b, hosts = auto(), special(), Changing()
    found = run(tmp_path, a, b, hosts)
    assert found.verdict == "faster"
    # At the beginning, before each pass, and before the replies that are judged.
    assert hosts.asked == [
        *((0, 0, False), (1, 1, False)),
        *((0, 0, True), (1, 1, False), (1, 1, False), (0, 0, False)),
        *((1, 1, True), (0, 0, False), (0, 0, False), (1, 1, False)),
        *((0, 0, False), (1, 1, False)),
    ]
    measured = WORKLOAD.requests[0].prompt_ids
    assert measured is not None
    for server in (a, b):
        # Three warm-ups of three passes of two requests; four passes and the judged replies.
        assert len(server.log) == 3 * 3 * 2 + 4 * 2 + 2
        assert sum(body["prompt"] == list(measured) for body in server.log) == 4 + 1
    assert "both servers started anew for each block" in render(found, MACHINE)


def test_a_new_server_has_to_be_what_it_was(tmp_path: Path) -> None:
    b = special()

    def change() -> None:
        b.config = {**(b.config or {}), "cache": {"dtype": "fp8", "page_tokens": 64}}

    with pytest.raises(HttpError, match=r"configuration: cache\.dtype: 'bf16' \| 'fp8'"):
        run(tmp_path, auto(), b, Changing(change))


@pytest.mark.parametrize("flags", [["--url-a", "x", "--url-b", "y"], ["--serve", "--task", "mrcr"]])
def test_only_servers_of_ours_can_be_started_anew(
    flags: list[str], mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [str(mini_checkpoint)] if "--serve" in flags else []
    assert cli.main(["compare", *model, *flags, "--restart", "arm"]) == 2
    assert "--restart arm is of a comparison of speed" in capsys.readouterr().err
