"""Needle items: a key that no text predicts, filler of a given length, and the key asked for again.

Owns the form of an item and what counts as found. Items are made from a seed and a text of the
caller's; the model's reply is greedy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams
from kdecode.model.tokenizer import Tokenizer

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_NAME_LETTERS, _KEY_LETTERS = 4, 6


@dataclass(frozen=True)
class Needle:
    """answer: the rest of the prompt's last line. The blank before the key is part of it, so that
    the key has the same tokens in both places."""

    prompt: str
    answer: str


def needle(rng: random.Random, filler: str) -> Needle:
    """An item around ``filler``, in the form of a program that assigns the key twice."""
    name = "".join(rng.choices(_ALPHABET, k=_NAME_LETTERS))
    answer = "".join(rng.choices(_ALPHABET, k=_KEY_LETTERS))
    line = f"SECRET_{name} ="
    prompt = f"{line} {answer}\n{filler}\n\n# The same key once more.\n{line}"
    return Needle(prompt, f" {answer}\n")


def make_items(
    tokenizer: Tokenizer, ids: Sequence[int], distance_tokens: int, count: int, seed: int
) -> list[Needle]:
    """Items whose filler is ``distance_tokens`` of the text, from places drawn by the seed.

    ValueError for a text that is shorter than that.
    """
    if len(ids) < distance_tokens:
        raise ValueError(
            f"The text has {len(ids):,} tokens; filler of {distance_tokens:,} cannot be cut from "
            "it."
        )
    rng = random.Random(f"{seed}:{distance_tokens}")
    items = []
    for _ in range(count):
        start = rng.randrange(len(ids) - distance_tokens + 1)
        filler = tokenizer.decode(ids[start : start + distance_tokens], skip_special=True)
        items.append(needle(rng, filler))
    return items


def find(
    llm: LLM, items: Sequence[Needle], on_item: Callable[[int, int], None] = lambda done, of: None
) -> list[bool]:
    """Whether each item's key is what the model's greedy reply begins with."""
    found = []
    for done, item in enumerate(items, start=1):
        # Every token has at least one letter of the answer, or is not part of it.
        params = SamplingParams(max_tokens=len(item.answer))
        (reply,) = llm.generate([item.prompt], params)
        if reply.error is not None:
            raise RuntimeError(f"An item could not be answered: {reply.error}")
        found.append(f"{reply.text}\n".startswith(item.answer))
        on_item(done, len(items))
    return found
