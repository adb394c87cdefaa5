"""What the intervals promise, on pairs whose true ratio is known, in seeded repetitions.

The times are those of a noisy machine: blocks that share a mood, a drift inside of each, passes and
requests that scatter. They are made up as records, so that a hundred comparisons take a second.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from mock_server import CONFIG, MockServer
from simulated import simulate

from kdecode.bench.metrics import RequestTiming
from kdecode.bench.serving.client import Client, ServedRecord
from kdecode.bench.serving.design import Design, MeasuredPass, pairs_of
from kdecode.bench.serving.http import Target
from kdecode.bench.serving.load import Load, PassResult
from kdecode.bench.serving.protocol import ServedComparison, compare_servers
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.verdicts import ratios
from kdecode.bench.workloads.synthetic import TokenRange, fixed

BLOCKS, REQUESTS, CHUNKS = 6, 2, 10


def measured(seed: int, ratio: float) -> RatioEstimate:
    """The estimate of tpot from one comparison's passes."""
    draw = np.random.default_rng(seed)
    passes = []
    for block in range(BLOCKS):
        mood, drift = draw.normal(0, 0.03), draw.normal(0, 0.01)
        done = [0, 0]
        for place, arm in enumerate([0, 1, 1, 0] if block % 2 == 0 else [1, 0, 0, 1]):
            speed = mood + drift * place + draw.normal(0, 0.02)
            records = tuple(
                record(
                    number, (ratio if arm == 0 else 1.0) * math.exp(speed + draw.normal(0, 0.02))
                )
                for number in range(REQUESTS)
            )
            result = PassResult(records, REQUESTS, 0, 1, ())
            passes.append(MeasuredPass(block, done[arm], arm, result))
            done[arm] += 1
    return ratios(pairs_of(passes), seed=0)["tpot"]


def record(number: int, factor: float) -> ServedRecord:
    """Ten chunks of 4 tokens, 40 ms apart at factor 1."""
    times = tuple(round(2e8 + i * 4e7 * factor) for i in range(CHUNKS))
    timing = RequestTiming(0, times, (4,) * CHUNKS)
    return ServedRecord(f"r{number}", "", 0, 0, times[-1], timing, None, None)


@pytest.mark.parametrize("seeds", range(0, 500, 100))
def test_a_known_ratio_is_covered_in_93_of_100(seeds: int) -> None:
    estimates = [measured(seeds + seed, 1.30) for seed in range(100)]
    assert sum(e.low <= 1.30 <= e.high for e in estimates) >= 93
    assert all(e.low > 1 for e in estimates)


@pytest.mark.parametrize("seeds", range(10_000, 10_500, 100))
def test_a_server_against_itself_is_called_different_in_7_of_100_at_most(seeds: int) -> None:
    estimates = [measured(seeds + seed, 1.0) for seed in range(100)]
    assert sum(not e.low <= 1 <= e.high for e in estimates) <= 7


@pytest.mark.slow
def test_the_same_through_servers(tmp_path: Path) -> None:
    """Sockets, streams, warm-up, null run and agreement included; minutes."""
    config = {**CONFIG, "decode_backend": "latency_specialized"}
    workload = fixed(2, 4, 8, TokenRange(0, 100), 0)

    def once(seed: int, chunk_ms: float) -> ServedComparison:
        async def main() -> ServedComparison:
            a = MockServer("a", chunk_ms=chunk_ms, noise=0.05, seed=seed)
            b = MockServer("b", noise=0.05, seed=seed + 10**6, config=config, coverage=1.0)
            async with a.running() as url_a, b.running() as url_b:
                clients = [Client(n, Target.from_url(u)) for n, u in (("a", url_a), ("b", url_b))]
                design = Design(Load(concurrency=1), has_null=False)
                return await compare_servers(clients[0], clients[1], workload, design)

        found: ServedComparison = simulate(tmp_path, main())
        return found

    known = [once(seed, 13.0).ratios["tpot"] for seed in range(100)]
    assert sum(e.low <= 1.30 <= e.high for e in known) >= 93
    same = [once(1000 + seed, 10.0) for seed in range(100)]
    assert sum(c.verdict != "no difference seen at this size" for c in same) <= 7
