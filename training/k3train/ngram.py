"""The baseline: a 5-gram model over the same tokens, with interpolated Kneser-Ney smoothing.

Owns counting and scoring. N-grams are kept as 64-bit hashes in sorted arrays: with the tens of
millions there are, two of them share a hash with a probability below 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ORDER = 5
_DISCOUNT = 0.8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """n-grams with their counts; contexts with the sum of counts and the number of n-grams."""

    grams: Hashes
    counts: Counts
    contexts: Hashes
    totals: Counts
    kinds: Counts


class NgramModel:
    """Trained on one stream of ids below vocab_size."""

    def __init__(self, stream: NDArray[np.uint16], vocab_size: int) -> None:
        self._vocab = vocab_size
        self._orders: list[_Order] = []
        for order in range(1, ORDER + 1):
            grams = _hashes(stream, order)
            contexts = _contexts(stream, order)
            if order == ORDER:
                unique, first, counts = np.unique(grams, return_index=True, return_counts=True)
            else:
                # How many different tokens stand before it, rather than how often it stands.
                _, places = np.unique(_hashes(stream, order + 1), return_index=True)
                grams, contexts = grams[1:][places], contexts[1:][places]
                unique, first, counts = np.unique(grams, return_index=True, return_counts=True)
            self._orders.append(_order(unique, counts, contexts[first]))

    def log_probabilities(self, stream: NDArray[np.uint16]) -> NDArray[np.float64]:
        """Natural logarithm of each token's probability given those before it, from the fifth."""
        skipped = ORDER - 1
        probability = np.full(len(stream) - skipped, 1.0 / self._vocab)
        for order, table in enumerate(self._orders, start=1):
            offset = skipped - (order - 1)
            counts = _look_up(table.grams, table.counts, _hashes(stream, order)[offset:])
            asked = _contexts(stream, order)[offset:]
            totals = _look_up(table.contexts, table.totals, asked)
            kinds = _look_up(table.contexts, table.kinds, asked)
            seen = np.maximum(totals, 1)
            own = np.maximum(counts - _DISCOUNT, 0.0) / seen
            mixed = own + _DISCOUNT * kinds / seen * probability
            probability = np.where(totals > 0, mixed, probability)
        return np.log(probability)


def _order(grams: Hashes, counts: Counts, contexts: Hashes) -> _Order:
    unique, inverse, kinds = np.unique(contexts, return_inverse=True, return_counts=True)
    totals = np.bincount(inverse, weights=counts).astype(np.int64)
    return _Order(grams, counts.astype(np.int64), unique, totals, kinds)


def _hashes(stream: NDArray[np.uint16], order: int) -> Hashes:
    """The hash of the n-gram that starts at each place."""
    count = len(stream) - order + 1
    value = np.full(count, order, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for place in range(order):
            value = (value ^ stream[place : place + count].astype(np.uint64)) * _FACTOR
            value ^= value >> np.uint64(29)
    return value


def _contexts(stream: NDArray[np.uint16], order: int) -> Hashes:
    """The hash of all but the last token of each n-gram."""
    count = len(stream) - order + 1
    if order == 1:
        return np.zeros(count, dtype=np.uint64)
    return _hashes(stream, order - 1)[:count]


def _look_up(keys: Hashes, values: Counts, asked: Hashes) -> Counts:
    places = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[places] == asked, values[places], 0)


def bits_per_byte(log_probabilities: NDArray[np.float64], num_bytes: int) -> float:
    return float(-log_probabilities.sum() / math.log(2) / num_bytes)
