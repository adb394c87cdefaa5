"""Workloads made from a seed: fixed lengths, and a small set of agents' sessions.

Owns their content, which comes from SHA-256 alone, so that it has the same bytes in every process
and on every machine. Does not know models: token ids come from a range that the caller names.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kdecode.bench.workloads.types import Request, Workload, WorkloadError

BLOCK_TOKENS = 64


@dataclass(frozen=True)
class TokenRange:
    """Token ids from low to below high: ordinary tokens of the served model."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise WorkloadError(f"Token ids {self.low} to {self.high} are no range.")

    @classmethod
    def from_text(cls, text: str) -> TokenRange:
        """LOW-HIGH. Raises WorkloadError."""
        low, dash, high = text.partition("-")
        if not dash or not low.isdecimal() or not high.isdecimal():
            raise WorkloadError(f"{text!r} is no range of token ids, such as 100-8000.")
        return cls(int(low), int(high))


def block_tokens(seed: int, block: str, tokens: TokenRange, size: int) -> list[int]:
    """The tokens of a named block: the same for a seed and a name, whatever is around it."""
    ids: list[int] = []
    counter = 0
    while len(ids) < size:
        digest = hashlib.sha256(f"{seed}/{block}/{counter}".encode()).digest()
        numbers = struct.unpack("<8I", digest)
        ids += [tokens.low + number % (tokens.high - tokens.low) for number in numbers]
        counter += 1
    return ids[:size]


def prompt_of_blocks(
    seed: int, blocks: Sequence[str], tokens: TokenRange, length: int, size: int
) -> tuple[int, ...]:
    """A prompt of so many tokens; what the blocks do not fill belongs to a block of its own."""
    ids: list[int] = []
    for block in blocks[: -(-length // size)]:
        ids += block_tokens(seed, block, tokens, size)
    if len(ids) < length:
        rest = "/".join((*blocks[-1:], "rest", str(length)))
        ids += block_tokens(seed, rest, tokens, length - len(ids))
    return tuple(ids[:length])


def fixed(
    num_requests: int, prompt_tokens: int, output_tokens: int, tokens: TokenRange, seed: int
) -> Workload:
    """Requests of one length, with nothing in common."""
    requests = tuple(
        Request(
            f"r{number}",
            output_tokens,
            prompt_ids=tuple(block_tokens(seed, f"fixed/{number}", tokens, prompt_tokens)),
        )
        for number in range(num_requests)
    )
    return Workload(f"fixed {prompt_tokens} in, {output_tokens} out, seed {seed}", requests)


@dataclass(frozen=True)
class AgentShape:
    """Sessions of an agent with tools: a system prompt that all share, then turns that grow.

    Each turn adds the reply of the one before and a tool's result, after a pause.
    """

    sessions: int = 10
    turns: int = 6
    system_blocks: int = 4
    first_blocks: tuple[int, int] = (2, 8)
    result_blocks: tuple[int, int] = (1, 6)
    output_tokens: tuple[int, int] = (16, 96)
    pause_s: tuple[float, float] = (0.0, 2.0)
    session_gap_s: float = 0.5


def agentic(shape: AgentShape, tokens: TokenRange, seed: int) -> Workload:
    """A seeded set of agents' sessions in blocks of 64 tokens, with recorded replies."""
    requests = []
    for session in range(shape.sessions):
        draw = _Draw(seed, f"session/{session}")
        blocks = [f"system/{n}" for n in range(shape.system_blocks)]
        blocks += [f"{session}/task/{n}" for n in range(draw.whole("task", *shape.first_blocks))]
        for turn in range(shape.turns):
            output = draw.whole(f"{turn}/output", *shape.output_tokens)
            low, high = shape.pause_s
            pause = low + (high - low) * draw.share(f"{turn}/pause")
            requests.append(
                Request(
                    f"s{session}t{turn}",
                    output,
                    prompt_ids=prompt_of_blocks(
                        seed, blocks, tokens, len(blocks) * BLOCK_TOKENS, BLOCK_TOKENS
                    ),
                    session=f"s{session}",
                    turn=turn,
                    at_s=session * shape.session_gap_s if turn == 0 else None,
                    delay_s=round(pause, 3) if turn else 0.0,
                )
            )
            # The recorded reply takes whole blocks, as everything else.
            size = -(-output // BLOCK_TOKENS) + draw.whole(f"{turn}/result", *shape.result_blocks)
            blocks += [f"{session}/{turn}/{n}" for n in range(size)]
    name = f"agentic, {shape.sessions} sessions of {shape.turns} turns, seed {seed}"
    return Workload(name, tuple(requests))


class _Draw:
    """Numbers by name; what one is does not depend on which others were drawn."""

    def __init__(self, seed: int, name: str) -> None:
        self._prefix = f"{seed}/{name}"

    def share(self, name: str) -> float:
        """From 0 to below 1."""
        digest = hashlib.sha256(f"{self._prefix}/{name}".encode()).digest()
        return int.from_bytes(digest[:6], "little") / 2**48

    def whole(self, name: str, low: int, high: int) -> int:
        return low + int(self.share(name) * (high - low + 1))
