"""How prompts are split into the steps of the standard forward: pure functions of token counts.

A chunk that is not a prompt's last ends on a multiple of `ALIGNMENT` tokens where it can, the chunk
of the delta rule, so that no step pads more than its last one. Correctness does not depend on it:
any split gives the same state. Does not know requests, caches or the scheduler's order.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 64


def share_budget(
    remaining: Sequence[int], budget_tokens: int, rooms: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Prompt tokens that each request gets in the next step, first come first served.

    remaining: prompt tokens that each request still has to run, in order of service. budget_tokens:
    what the step may hold besides its decode rows. rooms: the most that a chunk of each may have
    (`room_to_boundary`). A request is cut there and where the budget ends; then its chunk is a
    multiple of ALIGNMENT, unless the budget is below that for the first one.
    """
    if budget_tokens < 0:
        raise ValueError(f"The token budget of a step is {budget_tokens}; it cannot be negative.")
    if min(remaining, default=1) < 1:
        raise ValueError(f"A prompt has no tokens left to run: {list(remaining)}.")
    shares = []
    is_first = True
    for place, tokens in enumerate(remaining):
        wanted = tokens if rooms is None else min(tokens, rooms[place])
        share = min(wanted, budget_tokens)
        if share < wanted and share >= ALIGNMENT:
            share -= share % ALIGNMENT
        elif share < wanted and not is_first:
            share = 0  # a sliver for a later request costs a step's overhead and saves nothing
        budget_tokens -= share
        shares.append(share)
        is_first = False
        if share < wanted:
            break
    shares += [0] * (len(remaining) - len(shares))
    return tuple(shares)


def room_to_boundary(num_computed: int, interval_tokens: int) -> int:
    """Tokens that a chunk may have which does not go beyond the next multiple of the interval.

    Where a chunk ends decides the last bits of what it computes. Chunks that end on every multiple
    are the same ones behind it, whether the tokens before it were computed or found in a cache.
    """
    return interval_tokens - num_computed % interval_tokens


def split_prompt(num_tokens: int, budget_tokens: int) -> tuple[int, ...]:
    """Chunk sizes of one prompt that has every step for itself; their sum is ``num_tokens``."""
    if budget_tokens < 1:
        raise ValueError(f"The token budget of a step is {budget_tokens}; it has to be at least 1.")
    chunks = []
    while num_tokens:
        (share,) = share_budget((num_tokens,), budget_tokens)
        chunks.append(share)
        num_tokens -= share
    return tuple(chunks)
