"""Random numbers of speculative decoding: one for each (seed, round, purpose, place in the round).

A number depends on nothing else, so batch mates, preemption and how many numbers were drawn before
do not matter. A round is named by its anchor's position, which grows with every round. Numbers are
not keyed by the position of the token alone: block verification looks at all drafts of a round
before it rejects one, so a rejected position's number has already had a say when the next round
comes to that position, and using it again would bend the distribution.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

Purpose = Literal["draft", "accept", "extra"]

_KEY = struct.Struct("<QQ")
_FRACTION_BITS = 53


@dataclass(frozen=True)
class Streams:
    """The numbers of one round of one request."""

    seed: int
    anchor_position: int

    def uniform(self, purpose: Purpose, place: int = 0) -> float:
        """A number of [0, 1) of 53 bits."""
        person = purpose.encode()
        key = _KEY.pack(self.seed & (1 << 64) - 1, self.anchor_position)
        digest = blake2b(key + _KEY.pack(place, 0), digest_size=8, person=person).digest()
        return (int.from_bytes(digest, "little") >> (64 - _FRACTION_BITS)) / 2.0**_FRACTION_BITS

    def uniforms(self, purpose: Purpose, count: int) -> list[float]:
        return [self.uniform(purpose, place) for place in range(count)]
