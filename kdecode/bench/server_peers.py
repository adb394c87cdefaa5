"""Our server beside another engine's, on the same weights: the same requests, in turns.

Owns the protocol (every server once forwards and once backwards a block, at each concurrency, with
prompts that nobody has seen), and the two figures that are compared: output tokens a second, and
the slow tail of the time between chunks. Definitions are `bench.metrics`'; whether a ratio may be
printed is `bench.peers`'s. Does not know which servers these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdecode.bench.metrics import MetricError
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.counters import ServerCounts
from kdecode.bench.serving.load import Load, PassResult, run_pass
from kdecode.bench.serving.summary import Limits, summarize_passes
from kdecode.bench.statistics import RatioEstimate, estimate_ratio
from kdecode.bench.workloads.synthetic import TokenRange, fixed


@dataclass(frozen=True)
class ServerWork:
    """requests_per_slot: of one pass, for each request that is open at a time."""

    prompt_tokens: int
    output_tokens: int
    requests_per_slot: int
    tokens: TokenRange


@dataclass(frozen=True)
class ServerPass:
    """One pass of one server. icl_p90_s: 90th percentile of the gaps between chunks."""

    concurrency: int
    block: int
    arm: int
    output_tps: float
    icl_p50_s: float
    icl_p90_s: float
    ttft_p50_s: float
    tokens_per_chunk: float


async def measure_servers(
    clients: Sequence[Client],
    work: ServerWork,
    concurrencies: Sequence[int],
    blocks: int,
    progress: Callable[[str], None] = lambda message: None,
) -> list[ServerPass]:
    """Every server twice a block, in opposite orders, after a pass of each that is thrown away.

    Raises MetricError where a request failed.
    """
    forwards = list(range(len(clients)))
    passes = []
    for concurrency in concurrencies:
        for client in clients:
            progress(f"warm-up, {concurrency} at a time: {client.name}")
            await _pass(client, work, concurrency, seed=-1)
        for block in range(blocks):
            for half, order in enumerate((forwards, forwards[::-1])):
                for arm in order:
                    name = clients[arm].name
                    progress(f"{concurrency} at a time, block {block + 1} of {blocks}: {name}")
                    # The same prompts for every server, and new ones for each half of a block.
                    seed = concurrency * 10_000 + 2 * block + half
                    found = await _pass(clients[arm], work, concurrency, seed)
                    passes.append(_figures(clients[arm], found, concurrency, (block, arm)))
    return passes


async def _pass(client: Client, work: ServerWork, concurrency: int, seed: int) -> PassResult:
    """Raises MetricError where a request failed."""
    workload = fixed(
        work.requests_per_slot * concurrency,
        work.prompt_tokens,
        work.output_tokens,
        work.tokens,
        seed=seed,
    )
    result = await run_pass(client, workload, Load(concurrency=concurrency))
    errors = [record.error for record in result.records if record.error is not None]
    if errors:
        raise MetricError(
            f"{client.name}: {len(errors)} of {result.planned} requests failed; the first: "
            f"{errors[0]}"
        )
    return result


def _figures(
    client: Client, result: PassResult, concurrency: int, place: tuple[int, int]
) -> ServerPass:
    found = summarize_passes([result], ServerCounts(), Limits(), concurrency)
    speed, gaps, ttft = found.output_tps, found.icl_s, found.ttft_s
    if speed is None or gaps is None or ttft is None or found.tokens_per_chunk is None:
        raise MetricError(f"{client.name}: replies of one chunk have no time between chunks.")
    block, arm = place
    return ServerPass(
        concurrency=concurrency,
        block=block,
        arm=arm,
        output_tps=speed,
        icl_p50_s=gaps.p50,
        icl_p90_s=gaps.p90,
        ttft_p50_s=ttft.p50,
        tokens_per_chunk=found.tokens_per_chunk,
    )


def server_ratio(
    passes: Sequence[ServerPass],
    ours: int,
    peer: int,
    seconds_of: Callable[[ServerPass], float],
    seed: int,
) -> RatioEstimate:
    """The peer's seconds over ours, of passes of one concurrency: above 1, ours is faster.

    The k-th passes of a block are a pair; they had the same requests.
    """
    blocks: dict[int, tuple[list[ServerPass], list[ServerPass]]] = {}
    for one in passes:
        if one.arm in (ours, peer):
            blocks.setdefault(one.block, ([], []))[one.arm == peer].append(one)
    pairs = [
        [(seconds_of(b), seconds_of(a)) for a, b in zip(*sides, strict=True)]
        for sides in blocks.values()
    ]
    return estimate_ratio(pairs, seed)
