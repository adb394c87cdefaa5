"""Our engine beside other engines: interleaved runs, pairs, ratios, and whether they agree.

Owns the protocol (every arm once forwards and once backwards a block), which runs are pairs, and
the two gates: log-probabilities of a peer on unrounded weights must agree with ours before any
ratio, and arms whose weights differ from the checkpoint are compared only with arms that say so
too. Does not know what an arm runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from kdecode.bench.load import LoadMeter, is_spoilt
from kdecode.bench.statistics import RatioEstimate, estimate_ratio

# Mean KL divergence, in nats, that an engine on F32 weights may have from the unrounded reference:
# the same maths in another order costs less than 1e-8 on the presets, rounding to bf16 2e-3 and
# more, and other weights or other maths far more than that.
MAX_DIVERGENCE = 1e-4


class PeerArm(Protocol):
    """One engine with one set of weights. precision: what each class of tensor is held in.

    keeps_weights: whether its weights are the checkpoint's, bit by bit.
    settings: of its runs, complete once one has been made.
    """

    name: str
    version: str
    precision: Mapping[str, str]
    keeps_weights: bool
    settings: Mapping[str, Any]

    def tokens_per_second(self) -> float:
        """Of one run; every call is a run of the same work."""


@dataclass(frozen=True)
class PeerRun:
    """others_cores: cores that other processes kept busy meanwhile; None where not known."""

    block: int
    arm: int
    tokens_per_second: float
    others_cores: float | None

    @property
    def is_spoilt(self) -> bool:
        return is_spoilt(self.others_cores)


@dataclass(frozen=True)
class Divergence:
    """Of two engines' next-token distributions, position by position: KL(first || second)."""

    positions: int
    mean: float
    largest: float
    same_choice: int

    @property
    def agrees(self) -> bool:
        return self.mean <= MAX_DIVERGENCE


def divergence(first: np.ndarray, second: np.ndarray, floor_nats: float = math.inf) -> Divergence:
    """Of log-probabilities [positions, vocab], fp64; neither has to be normalised.

    floor_nats: what is further below the largest of its position counts as this far, on both sides.
    """
    first, second = _normalised(first, floor_nats), _normalised(second, floor_nats)
    each = (np.exp(first) * (first - second)).sum(-1)
    same = int((first.argmax(-1) == second.argmax(-1)).sum())
    return Divergence(len(each), float(each.mean()), float(each.max()), same)


def _normalised(logits: np.ndarray, floor_nats: float) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits = np.maximum(logits - logits.max(-1, keepdims=True), -floor_nats)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def measure_peers(
    arms: Sequence[PeerArm],
    blocks: int,
    progress: Callable[[str], None] = lambda message: None,
    meter: LoadMeter | None = None,
) -> list[PeerRun]:
    """Every arm twice a block, in opposite orders, after one run of each that is thrown away."""
    meter = meter or LoadMeter()
    for arm in arms:
        progress(f"warm-up: {arm.name}")
        arm.tokens_per_second()
    runs = []
    forwards = list(range(len(arms)))
    for block in range(blocks):
        for index in (*forwards, *reversed(forwards)):
            progress(f"block {block + 1} of {blocks}: {arms[index].name}")
            meter.start()
            speed = arms[index].tokens_per_second()
            runs.append(PeerRun(block, index, speed, meter.stop()))
    return runs


def typical_speed(runs: Sequence[PeerRun], arm: int) -> float:
    """Median tokens a second of the arm's runs that were not spoilt, or of all if none was left."""
    mine = [run for run in runs if run.arm == arm]
    clean = [run.tokens_per_second for run in mine if not run.is_spoilt]
    return median(clean or [run.tokens_per_second for run in mine])


def peer_ratio(runs: Sequence[PeerRun], ours: int, peer: int, seed: int) -> RatioEstimate:
    """Our tokens a second over the peer's, of the pairs that `used_pairs` says."""
    used, _ = used_pairs(runs, ours, peer)
    pairs = [[(1 / b.tokens_per_second, 1 / a.tokens_per_second) for a, b in use] for use in used]
    return estimate_ratio(pairs, seed)


def used_pairs(
    runs: Sequence[PeerRun], ours: int, peer: int
) -> tuple[list[list[tuple[PeerRun, ...]]], bool]:
    """The pairs that count, by block, and whether spoilt ones are among them.

    The k-th runs of a block are a pair. Spoilt pairs are left out as long as two blocks keep a
    pair; otherwise all pairs count.
    """
    blocks: dict[int, tuple[list[PeerRun], list[PeerRun]]] = {}
    for run in runs:
        pair = blocks.setdefault(run.block, ([], []))
        if run.arm in (ours, peer):
            pair[run.arm == peer].append(run)
    every = [list(zip(*sides, strict=True)) for sides in blocks.values()]
    clean = [[p for p in block if not (p[0].is_spoilt or p[1].is_spoilt)] for block in every]
    if sum(map(bool, clean)) > 1:
        return clean, False
    return every, clean != every


def refusal(
    ours: PeerArm, peer: PeerArm, agreement: Divergence | None, *, needs_check: bool
) -> str | None:
    """Why no ratio of these two is printed; None where there is one.

    agreement: of the peer with our reference on unrounded weights; None if it was not checked.
    needs_check: whether the peer read weights that we converted for it.
    """
    if ours.keeps_weights != peer.keeps_weights:
        changed = peer if ours.keeps_weights else ours
        return f"the weights of {changed.name} differ from the checkpoint's"
    if not needs_check:
        return None
    if agreement is None:
        return "the peer's logits were not checked"
    if not agreement.agrees:
        return (
            f"its logits are {agreement.mean:.2e} nats from ours on the same F32 weights; at most "
            f"{MAX_DIVERGENCE:.0e} is the same model"
        )
    return None
