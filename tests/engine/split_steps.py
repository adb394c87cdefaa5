"""Decode rows and a chunk of a prompt: in one step, or in two? `python tests/engine/split_steps.py
MODEL`.

One step of both runs on the standard path; two are the plan for the decode rows and the standard
path for the chunk, which is what the scheduler does. Prints the time of each, of interleaved runs,
and the ratio: above 1, two steps are faster. Not a test: its figures need a quiet machine, or one
thread and `--processor-time`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.engine.engine import LLM

Clock = Callable[[], float]
PAGE_TOKENS = 64


def request(
    ids: list[int], start: int, slot: int, room_tokens: int, *, is_decode: bool
) -> StepRequest:
    """Slot number s has the pages of its own room."""
    pages = room_tokens // PAGE_TOKENS
    own = tuple(range(slot * pages, (slot + 1) * pages))
    return StepRequest(tuple(ids), start, slot, own, is_decode=is_decode)


def measure(
    llm: LLM, rows: int, chunk: int, context: int, room: int, repeats: int, clock: Clock
) -> str:
    def seconds(*batches: StepBatch) -> float:
        begin = clock()
        for batch in batches:
            llm._worker.runner.run(batch)
        return clock() - begin

    draw = random.Random(0)
    ids = [draw.randrange(1000) for _ in range(room)]
    for slot in range(rows):
        filled = request(ids[:context], 0, slot, room, is_decode=False)
        llm._worker.runner.run(StepBatch((filled,)))
    # The same positions again and again: states drift, times do not.
    decoding = tuple(request(ids[:1], context, slot, room, is_decode=True) for slot in range(rows))
    prompt = request(ids[:chunk], 0, rows, room, is_decode=False)
    one, two = [], []
    for number in range(repeats + 1):
        one.append(seconds(StepBatch((*decoding, prompt))))
        two.append(seconds(StepBatch(decoding), StepBatch((prompt,))))
        if number == 0:
            one.clear()
            two.clear()
    ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
    return (
        f"{rows} decode rows, {chunk} tokens of a prompt: one step "
        f"{1e3 * statistics.median(one):.1f} ms, two steps {1e3 * statistics.median(two):.1f} ms, "
        f"{ratio:.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", nargs="+", default=["latency_specialized", "auto"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--chunk", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--context-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    longest = max(args.context_tokens + 1, *args.chunk)
    room = longest + -longest % PAGE_TOKENS
    for backend in args.backend:
        llm = LLM(
            args.model,
            decode_backend=backend,
            num_threads=args.threads,
            max_requests=max(args.rows) + 1,
            max_context_tokens=room,
            max_step_tokens=max(args.chunk) + max(args.rows),
            page_tokens=PAGE_TOKENS,
        )
        for rows in args.rows:
            for chunk in args.chunk:
                sizes = rows, chunk, args.context_tokens, room, args.repeats
                found = measure(llm, *sizes, clock)
                print(f"{backend}: {found}", flush=True)


if __name__ == "__main__":
    main()
