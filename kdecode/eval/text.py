"""How well a model predicts a text, through the decode path that generation takes.

Owns the cut into windows and the figures. Every scored token is the result of a decode step of one
row, so that the figure is the backend's own: a prompt would run through the standard forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kdecode.engine.engine import LLM


@dataclass(frozen=True)
class TextScore:
    """nats: minus the log probability of all scored tokens. num_bytes: what they stand for."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        """By token: it depends on the vocabulary, so only compare it within one model."""
        return math.exp(self.nats / self.num_tokens)

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(
            self.nats + other.nats,
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
        )


def windows(ids: Sequence[int], window_tokens: int) -> list[Sequence[int]]:
    """Consecutive windows that share one token: a window's last one is the next one's first.

    So every token but the first is scored once. ValueError for a window without a scored token.
    """
    if window_tokens < 2:
        raise ValueError(f"A window has at least 2 tokens; this one has {window_tokens}.")
    starts = range(0, len(ids) - 1, window_tokens - 1)
    return [ids[start : start + window_tokens] for start in starts]


def score_text(
    llm: LLM,
    ids: Sequence[int],
    window_tokens: int,
    on_window: Callable[[int, int], None] = lambda done, of: None,
) -> TextScore:
    """Scores all tokens but the first, each given those before it in its window.

    on_window(windows done, windows). RequestError for a window that the engine cannot hold;
    ValueError for fewer than two tokens.
    """
    if len(ids) < 2:
        raise ValueError(f"A text has at least 2 tokens to be scored; this one has {len(ids)}.")
    parts = windows(ids, window_tokens)
    total = TextScore(0.0, 0, 0)
    for done, part in enumerate(parts, start=1):
        total += _score_window(llm, part)
        on_window(done, len(parts))
    return total


def _score_window(llm: LLM, ids: Sequence[int]) -> TextScore:
    nats = 0.0
    for logits, (_, wanted) in zip(llm.follow_reply(ids[:1], ids[1:]), pairwise(ids), strict=True):
        row = logits.double()
        nats += float(row.logsumexp(-1) - row[wanted])
    tokenizer = llm.tokenizer
    # A special token, such as the end of a document, is no text.
    plain = (token for token in ids[1:] if not tokenizer.is_special(token))
    num_bytes = sum(len(tokenizer.token_bytes(token)) for token in plain)
    return TextScore(nats, len(ids) - 1, num_bytes)
