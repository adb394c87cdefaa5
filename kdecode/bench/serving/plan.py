"""What a comparison of two servers would do, worked out without asking either of them.

Owns the counts of passes and requests, the time that they take at speeds which the caller expects,
and the list of what has to be equal. The rules themselves are `gate`'s and `verdicts`', the order
is `protocol`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kdecode.bench.serving import gate
from kdecode.bench.serving.design import Design, block_orders
from kdecode.bench.serving.facts import CANNOT_SEE
from kdecode.bench.serving.load import Load
from kdecode.bench.statistics import expected_detectable
from kdecode.bench.tables import columns
from kdecode.bench.verdicts import COMPARED_SETTING, MIN_COVERAGE, SPECIALIZED_BACKEND
from kdecode.bench.wording import counted
from kdecode.bench.workloads.types import Request, Workload

# Standard deviations between blocks that the smallest effect is told for.
_SPREADS = (0.01, 0.03)
_ORDERS_SHOWN = 3


@dataclass(frozen=True)
class Expected:
    """Of one request, in seconds: to its first token, and for each token behind it."""

    ttft_s: float
    tpot_s: float

    def __str__(self) -> str:
        return f"{1e3 * self.ttft_s:g} ms to the first token and {1e3 * self.tpot_s:g} ms a token"

    def request_s(self, request: Request) -> float:
        return self.ttft_s + (request.max_tokens - 1) * self.tpot_s


@dataclass(frozen=True)
class Phase:
    """passes: the least and the most of each arm. requests: of one pass."""

    name: str
    passes: tuple[tuple[int, int], tuple[int, int]]
    requests: int
    pass_s: float

    @property
    def total(self) -> tuple[int, int]:
        """Passes of both arms."""
        (low_a, high_a), (low_b, high_b) = self.passes
        return low_a + low_b, high_a + high_b


def phases(workload: Workload, design: Design, expected: Expected) -> list[Phase]:
    """In their order."""
    few = min(design.warmup_requests, len(workload.requests))
    longest = sorted(workload.requests, key=lambda request: request.max_tokens)[-few:]
    alone = Workload("warm-up", tuple(longest))
    concurrency = min(design.load.concurrency or 1, len(workload.sessions()), few)
    warm_s = pass_seconds(alone, Load(concurrency=concurrency), expected, has_pauses=False)
    whole_s = pass_seconds(workload, design.load, expected)
    in_turn_s = sum(map(expected.request_s, workload.requests))
    number = len(workload.requests)
    half = 2 * design.blocks
    least, most = design.warmup_passes
    starts_a, starts_b = _warm_starts(design)
    warm = (least * starts_a, most * starts_a), (least * starts_b, most * starts_b)
    found = [Phase("warm-up, discarded", warm, few, warm_s)]
    if design.has_null:
        found.append(Phase("null run, a against a", ((2 * half,) * 2, (0, 0)), number, whole_s))
    found.append(Phase("blocks", ((half,) * 2,) * 2, number, whole_s))
    # The second one scores the baseline's replies, where the servers tell logprobs of prompts.
    found.append(Phase("outputs, one at a time", ((1, 2),) * 2, number, in_turn_s))
    return found


def _warm_starts(design: Design) -> tuple[int, int]:
    """How often each server is warmed up: at first, and whenever it was started anew."""
    orders = block_orders(design)
    # (server, role, whether a block begins), as the run asks `hosting` for them.
    turns = [(0, 0, False), (1, 1, False)]
    for servers in ([(0, 0)] if design.has_null else []) + [(0, 1)]:
        turns += [
            (servers[arm], arm, place == 0) for order in orders for place, arm in enumerate(order)
        ]
    turns += [(0, 0, False), (1, 1, False)]
    starts = [1, 1]
    for (server, role, begins), before in zip(turns[2:], turns[1:], strict=False):
        if design.restart == "arm" and (server, role) != before[:2]:
            starts[server] += 1
        elif design.restart == "block" and begins:
            starts = [number + 1 for number in starts]
    return starts[0], starts[1]


def pass_seconds(
    workload: Workload, load: Load, expected: Expected, *, has_pauses: bool = True
) -> float:
    """Of one pass, if requests do not slow each other down."""

    def session_s(turns: Sequence[Request]) -> float:
        pauses = sum(turn.delay_s for turn in turns[1:]) / load.speed if has_pauses else 0.0
        return pauses + sum(map(expected.request_s, turns))

    sessions = workload.sessions()
    if load.concurrency is None:
        starts = load.starts_s(sessions)
        return max(at + session_s(turns) for at, turns in zip(starts, sessions, strict=True))
    free_at = [0.0] * load.concurrency
    for turns in sessions:
        heapq.heappush(free_at, heapq.heappop(free_at) + session_s(turns))
    return max(free_at)


def plan_lines(
    arms: Sequence[tuple[str, str]], workload: Workload, design: Design, expected: Expected | None
) -> list[str]:
    """arms: name, and where it is or how it is started."""
    found = phases(workload, design, expected or Expected(0.0, 0.0))
    number = len(workload.requests)
    lines = [f"{name}: {where}" for name, where in arms]
    lines += [
        f"workload: {workload.name}, {counted(number, 'request')} in "
        f"{counted(len(workload.sessions()), 'session')}, {workload.reply_mode} replies",
        f"tokens of a pass: {_prompt_tokens(workload)} in, up to "
        f"{sum(request.max_tokens for request in workload.requests):,} out",
        f"load: {design.load}; caches: {design.cache}",
        "",
        *_phase_lines(found, has_times=expected is not None),
        _time_line(found, expected),
        "",
        *_order_lines(design),
        f"pairs: {2 * design.blocks * number:,} in {design.blocks} blocks, the same request in the "
        "i-th pass of each arm",
        *_effect_lines(design),
        "",
        *_gate_lines(workload, design),
    ]
    return lines


def _prompt_tokens(workload: Workload) -> str:
    known = [len(request.prompt_ids) for request in workload.requests if request.prompt_ids]
    if len(known) < len(workload.requests):
        return "prompts of texts, which the servers count,"
    return f"{sum(known):,}"


def _phase_lines(found: Sequence[Phase], *, has_times: bool) -> list[str]:
    rows = [("", "passes of a", "passes of b", "requests of a pass", "requests", "time")]
    for phase in found:
        low, high = phase.total
        rows.append(
            (
                phase.name,
                *(_span(*passes) for passes in phase.passes),
                str(phase.requests),
                _span(low * phase.requests, high * phase.requests),
                _times(low * phase.pass_s, high * phase.pass_s) if has_times else "-",
            )
        )
    totals = [[phase.total[side] * phase.requests for phase in found] for side in (0, 1)]
    rows.append(("in all", "", "", "", _span(*map(sum, totals)), ""))
    return columns(rows)


def _time_line(found: Sequence[Phase], expected: Expected | None) -> str:
    if expected is None:
        least = sum(phase.total[0] * phase.pass_s for phase in found)
        return (
            f"time: pauses and scheduled starts alone take {_times(least, least)}; with "
            "--expect-ttft-ms and --expect-tpot-ms the rest is worked out, too"
        )
    low, high = (sum(phase.total[side] * phase.pass_s for phase in found) for side in (0, 1))
    return (
        f"time: {_times(low, high)} at {expected}, if requests do not slow each other down; the "
        "start of servers is not in it"
    )


def _order_lines(design: Design) -> Iterator[str]:
    orders = block_orders(design)
    names = ["".join("ab"[arm] for arm in order) for order in orders]
    shown = ", ".join(names[:_ORDERS_SHOWN]) + (", ..." if len(names) > _ORDERS_SHOWN else "")
    if design.restart == "block":
        yield "both servers are started anew, and warmed up, for each block"
    elif design.restart == "arm":
        yield "one server runs at a time; it is started anew, and warmed up, whenever its arm's"
        yield "  passes begin: each time that a letter of the order differs from the one before"
    yield f"order of the passes, block by block: {shown} ({design.order}, seed {design.seed})"


def _effect_lines(design: Design) -> Iterator[str]:
    told = ", ".join(
        f"{100 * (expected_detectable(spread, design.blocks) - 1):.1f} % where their ratios have a "
        f"standard deviation of {100 * spread:g} %"
        for spread in _SPREADS
    )
    yield f"smallest effect seen in 80 % of runs with {design.blocks} blocks: {told}"


def _gate_lines(workload: Workload, design: Design) -> Iterator[str]:
    """The conditions of a ratio, in the order in which they are found out."""
    yield "a ratio is printed if"
    yield f"  every setting that the servers resolved is equal, but {COMPARED_SETTING}; both tell"
    yield f"    {', '.join(CANNOT_SEE)} (--preflight reads and compares them now)"
    yield "  both run on as many devices, and give results of one kind: with drafts, without them,"
    yield "    or with synthetic acceptance, which is then what was asked for"
    if workload.reply_mode == "live":
        yield "  NEVER with live replies: they make other prompts in each arm, which are no pairs"
    if design.has_null:
        yield "  the interval of the null run has 1 in it"
    yield "  every planned request is completed, with as many prompt tokens in both arms, and time"
    yield "    per token is defined: the server's usage tells the tokens of chunks"
    yield (
        f"  the arms' shares of prompt tokens from caches differ by at most "
        f"{100 * gate.MAX_HIT_DIFFERENCE:g} points"
    )
    yield f"  the client is at most {100 * gate.MAX_LAG_SHARE:g} % of the median latency late (P90)"
    near_tie = "as a's roundings say" if design.near_tie is None else f"up to {design.near_tie:g}"
    yield f"  greedy replies part nowhere, or at a near-tie: {near_tie} in ln p"
    yield (
        f"  an arm with {SPECIALIZED_BACKEND} runs at least {100 * MIN_COVERAGE:g} % of its decode "
        "steps specialised"
    )


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _times(low: float, high: float) -> str:
    unit, size = ("s", 1) if high < 120 else ("min", 60)
    texts = dict.fromkeys(f"{value / size:.1f}" for value in (low, high))
    return f"{' to '.join(texts)} {unit}"
