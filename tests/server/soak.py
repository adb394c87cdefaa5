"""A server under mixed requests for a long time: `python tests/server/soak.py MODEL --minutes 30`.

Owns the requests, made from a seed, the samples of the server's memory, and the verdict: no reply
but the expected ones, nothing held at the end, memory flat. Exit code 1 where that does not hold.
The server is a process of its own, with caches so small that they are full within the first minutes
of a long run: memory that is only touched late would look like a leak.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from server_process import start

CONTEXT = 1024
SLOTS = 16
FLAGS = (
    *("--served-model-name", "m", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)),
    *("--decode-backend", "latency_specialized", "--mamba-block-size", "128"),
)
# What memory may gain between the second and the last quarter of a run.
MOST_GROWTH = 0.01
# Seconds without a byte after which a client gives up: something hangs.
PATIENCE = 120.0
HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "kdecode:state_slot_usage",
)


@dataclass(frozen=True)
class Sample:
    seconds: float
    memory_bytes: int
    threads: int
    files: int


@dataclass
class Tally:
    """What the clients saw. faults: answers that nobody expects."""

    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, tokens: int = 0) -> None:
        with self.lock:
            self.done[kind] += 1
            self.tokens += tokens

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)


def growth(values: Sequence[float]) -> float:
    """From the second quarter's median to the last one's, as a share of the former."""
    quarter = len(values) // 4
    if not quarter:
        raise ValueError(f"{len(values)} samples have no quarters; at least 4 are needed.")
    before = median(values[quarter : 2 * quarter])
    return median(values[-quarter:]) / before - 1


def body_of(draw: random.Random, stems: Sequence[Sequence[int]]) -> tuple[str, dict[str, Any]]:
    """A request's path and body. Token ids are below 1,000, which every preset has."""
    settings: dict[str, Any] = {"model": "m", "max_tokens": draw.randint(1, 48)}
    settings["stream"] = draw.random() < 0.6
    if draw.random() < 0.5:
        settings["temperature"] = 0
    else:
        settings |= {"temperature": 0.8, "top_p": 0.95, "seed": draw.randrange(1000)}
    if draw.random() < 0.2:
        settings["stop"] = [draw.choice("aeiou"), "##"]
    if draw.random() < 0.1:
        settings["presence_penalty"] = 0.5
    if draw.random() < 0.1:
        settings["n"] = 2
    kind = draw.random()
    if kind < 0.15:
        text = "".join(draw.choices("abcde fghij 猫", k=draw.randint(1, 200)))
        return "/v1/chat/completions", {
            **settings,
            "messages": [{"role": "user", "content": text}],
            "reasoning_effort": draw.choice(("none", "low")),
        }
    length = round((CONTEXT - 64) ** draw.random())
    shared = draw.choice((0, length // 2, length - 1))
    ids = [*draw.choice(stems)[:shared], *(draw.randrange(1000) for _ in range(length - shared))]
    if kind < 0.2:
        settings["guided_regex"] = f"[a-d]{{{draw.randint(1, 12)}}}"
    if kind > 0.97:
        # Refused: longer than the context.
        ids = ids + [1] * CONTEXT
    return "/v1/completions", {**settings, "prompt": ids}


def one_request(client: httpx.Client, draw: random.Random, stems: Any, tally: Tally) -> None:
    path, body = body_of(draw, stems)
    expected = 400 if len(body.get("prompt", ())) > CONTEXT else 200
    leaves_after = draw.randint(1, 6) if draw.random() < 0.15 else None
    with client.stream("POST", path, json=body) as response:
        if response.status_code != expected:
            tally.fault(f"{response.status_code}: {response.read()[:300]!r} to {str(body)[:300]}")
            return
        if not body["stream"] or expected != 200:
            document = json.loads(response.read())
            used = document.get("usage", {}).get("completion_tokens", 0)
            tally.add("refused" if expected == 400 else "whole", used)
            return
        events = 0
        for line in response.iter_lines():
            events += line.startswith("data: {")
            if events == leaves_after:
                tally.add("left", events)
                return
            if '"error"' in line[:20]:
                tally.fault(f"an error in a stream: {line[:300]}")
            if line == "data: [DONE]":
                tally.add("stream", events)
                return
        tally.fault(f"a stream ended after {events} events without [DONE]: {str(body)[:300]}")


def client_of(url: str, seed: int, until: float, tally: Tally) -> None:
    draw = random.Random(seed)
    # The same for every client, so that prefixes are found.
    source = random.Random(0)
    stems = [[source.randrange(1000) for _ in range(CONTEXT)] for _ in range(6)]
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        while time.monotonic() < until and len(tally.faults) < 20:
            try:
                one_request(client, draw, stems, tally)
            except (httpx.HTTPError, ValueError) as error:
                tally.fault(f"{type(error).__name__}: {error}")


def sample(pid: int, begin: float) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    numbers = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    memory = int(numbers["VmRSS"]) * 1024
    return Sample(time.monotonic() - begin, memory, int(numbers["Threads"]), files)


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    found = [line for line in lines if re.match(re.escape(name) + r"[{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def soak(model: Path, seconds: float, concurrency: int, every: float) -> list[str]:
    """Runs it, prints what happens, and returns what is wrong."""
    process, url = start(model, *FLAGS)
    assert process.stderr is not None
    # A pipe that nobody reads would stop the server.
    log: list[str] = []
    threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
    tally, samples, begin = Tally(), list[Sample](), time.monotonic()
    clients = [
        threading.Thread(target=client_of, args=(url, seed, begin + seconds, tally))
        for seed in range(concurrency)
    ]
    try:
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            time.sleep(every)
            samples.append(sample(process.pid, begin))
            if len(samples) % 10 == 1:
                print(f"{describe(samples[-1])}, {sum(tally.done.values()):,} requests", flush=True)
        held = [name for name in HELD if metric(url, name)]
        print(report(samples, tally, url), flush=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    finally:
        process.kill()
        process.wait()
    wrong = [*tally.faults, *(f"{name} is not 0 with no request open" for name in held)]
    if code:
        wrong.append(f"the server ended with {code}")
    wrong += [line.strip() for line in log if "Traceback" in line or "ERROR" in line]
    gain = growth([entry.memory_bytes for entry in samples])
    if gain > MOST_GROWTH:
        wrong.append(f"memory grew by {gain:.1%}; at most {MOST_GROWTH:.0%} is flat")
    if samples[-1].files > samples[len(samples) // 4].files + concurrency:
        wrong.append(f"open files grew to {samples[-1].files}")
    return wrong


def describe(entry: Sample) -> str:
    return (
        f"{entry.seconds / 60:.1f} min: {entry.memory_bytes / 2**20:.1f} MiB, {entry.threads} "
        f"threads, {entry.files} files"
    )


def report(samples: Sequence[Sample], tally: Tally, url: str) -> str:
    memory = [entry.memory_bytes / 2**20 for entry in samples]
    quarter = len(memory) // 4
    names = (
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "kdecode:prefix_cache_state_evictions_total",
        "kdecode:coverage",
    )
    counted = ", ".join(f"{name} {metric(url, name):g}" for name in names)
    return (
        f"{describe(samples[-1])}\nmemory by quarters, median: "
        + ", ".join(f"{median(memory[i * quarter : (i + 1) * quarter]):.1f}" for i in range(4))
        + f" MiB; the last against the second {growth(memory):+.2%}\n{dict(tally.done)}, "
        f"{tally.tokens:,} tokens, {len(tally.faults)} faults\n{counted}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    args = parser.parse_args()
    wrong = soak(args.model, args.minutes * 60, args.concurrency, args.every)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
