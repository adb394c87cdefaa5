"""Tiny languages whose every distribution depends on what came before, and exact enumeration."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kdecode.speculative.accept import Accepted, chances, residual, run_chances, run_weights

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Language:
    """The next token's distribution after every prefix."""

    vocab: int
    next_token: Callable[[Prefix], Tensor]

    def probability(self, tokens: Prefix) -> float:
        result = 1.0
        for place, token in enumerate(tokens):
            result *= float(self.next_token(tokens[:place])[token])
        return result


def random_language(vocab: int, seed: int, zeros: bool = False) -> Language:
    """Uneven distributions; with ``zeros`` every one leaves a token out."""

    @cache
    def next_token(prefix: Prefix) -> Tensor:
        number = sum((token + 1) * 7**place for place, token in enumerate(prefix))
        generator = torch.Generator().manual_seed(seed * 10_007 + number)
        row = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2 + 0.01
        if zeros:
            row[int(torch.randint(vocab, (1,), generator=generator))] = 0.0
        return row / row.sum()

    return Language(vocab, next_token)


def fixed_language(*rows: tuple[float, ...]) -> Language:
    """The same rows whatever the tokens are; the last one goes on for ever."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return Language(len(rows[0]), lambda prefix: tensors[min(len(prefix), len(rows) - 1)])


def first_choice(language: Language) -> Language:
    """A drafter that always takes the likeliest token."""

    def next_token(prefix: Prefix) -> Tensor:
        row = torch.zeros(language.vocab, dtype=torch.float64)
        row[int(language.next_token(prefix).argmax())] = 1.0
        return row

    return Language(language.vocab, next_token)


@dataclass(frozen=True)
class Round:
    """One possible proposal, with how likely it is."""

    weight: float
    drafts: Prefix
    p: Tensor  # [1, N + 1, vocab]
    q: Tensor  # [1, N, vocab]


def rounds(target: Language, drafter: Language, num_drafts: int) -> Iterator[Round]:
    for drafts in itertools.product(range(target.vocab), repeat=num_drafts):
        weight = drafter.probability(drafts)
        if weight > 0:
            prefixes = [drafts[:place] for place in range(num_drafts + 1)]
            p = torch.stack([target.next_token(prefix) for prefix in prefixes])
            q = torch.stack([drafter.next_token(prefix) for prefix in prefixes[:-1]])
            yield Round(weight, drafts, p.unsqueeze(0), q.unsqueeze(0))


def run_lengths(one: Round, method: str, q: Tensor | None) -> list[float]:
    """The probability of each number of accepted drafts, 0..N."""
    drafts = torch.tensor([one.drafts])
    if method == "standard":
        holds = chances(one.p, drafts, q).clamp_max(1.0)[0].tolist()
        ends = [1 - hold for hold in holds] + [1.0]
        result, reached = [], 1.0
        for place, end in enumerate(ends):
            result.append(reached * end)
            reached *= holds[place] if place < len(holds) else 0.0
        return result
    result, left = [], 1.0
    for run in reversed([1.0, *run_chances(one.p, drafts, q)[0].tolist()]):
        result.append(left * run)
        left *= 1 - run
    return result[::-1]


def emitted(
    target: Language, drafter: Language, num_drafts: int, method: str, is_one_hot: bool
) -> tuple[dict[Prefix, float], float]:
    """The distribution of the first N + 1 tokens, and the expected number of accepted drafts.

    Behind the extra token the target goes on by itself.
    """
    found: dict[Prefix, float] = defaultdict(float)
    expected = 0.0
    for one in rounds(target, drafter, num_drafts):
        q = None if is_one_hot else one.q
        drafts = torch.tensor([one.drafts])
        weights = run_weights(one.p, drafts, q)[0]
        for count, chance in enumerate(run_lengths(one, method, q)):
            if chance <= 0:
                continue
            expected += one.weight * chance * count
            weight = weights[count : count + 1] if method == "block" else torch.ones(1)
            row = residual(one.p, drafts, q, Accepted(torch.tensor([count]), weight.double()))[0]
            row = row / row.sum()
            for token in range(target.vocab):
                head = (*one.drafts[:count], token)
                for tail in itertools.product(range(target.vocab), repeat=num_drafts - count):
                    rest = target.probability((*head, *tail)) / max(
                        target.probability(head), 1e-300
                    )
                    share = one.weight * chance * float(row[token]) * rest
                    if share > 0:
                        found[(*head, *tail)] += share
    return dict(found), expected
