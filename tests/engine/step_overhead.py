"""What a decode step costs outside of the model: `python tests/engine/step_overhead.py MODEL ROWS`.

Prints, for each backend, the median step and the share of it that is neither forward nor waiting:
scheduling, choice of tokens, texts and events. Not a test: its figures need a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams


def timed(call: Callable[..., Any], into: list[int]) -> Callable[..., Any]:
    def run(argument: Any) -> Any:
        begin = time.perf_counter_ns()
        result = call(argument)
        into.append(time.perf_counter_ns() - begin)
        return result

    return run


def measure(model: Path, backend: str, rows: int, steps: int) -> str:
    llm = LLM(
        model,
        decode_backend=backend,
        max_requests=rows,
        max_context_tokens=1024,
        enable_prefix_caching=True,
    )
    worker, loop, draw = llm._worker, llm.loop, random.Random(0)
    forward, work, whole = list[int](), list[int](), list[int]()
    worker.runner.run = timed(worker.runner.run, forward)  # type: ignore[method-assign]
    worker.execute = timed(worker.execute, work)  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=steps + rows, ignore_eos=True)
    for _ in range(rows):
        llm.add_request([draw.randrange(1000) for _ in range(32)], params)
    while loop.scheduler.num_waiting or any(
        request.state != "decode" for request in loop.scheduler._running
    ):
        loop.step()
    forward.clear()
    work.clear()
    for _ in range(steps):
        begin = time.perf_counter_ns()
        loop.step()
        whole.append(time.perf_counter_ns() - begin)
    outside = [a - b for a, b in zip(whole, forward, strict=True)]
    choice = [a - b for a, b in zip(work, forward, strict=True)]
    share = statistics.median(a / b for a, b in zip(outside, whole, strict=True))
    return (
        f"{backend}: step {statistics.median(whole) / 1e6:.2f} ms, outside of the forward "
        f"{statistics.median(outside) / 1e6:.2f} ms ({share:.2%}), of which choosing tokens "
        f"{statistics.median(choice) / 1e6:.2f} ms; {llm.stats()['decode_steps']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", nargs="+", default=["auto", "latency_specialized"])
    args = parser.parse_args()
    for backend in args.backend:
        print(measure(args.model, backend, args.rows, args.steps), flush=True)


if __name__ == "__main__":
    main()
