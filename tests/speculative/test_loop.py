"""Rounds over the standard path: any acceptance leaves tokens and state of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from round_cases import PROMPTS, STATE, ActiveRequest, Counted, Machine, make_tiny, run_round
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig
from kdecode.decode.auto import build_auto_plan
from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.speculative.types import Proposal, Verdict
from kdecode.testing.compare import bit_equal, near_tie, state_close
from kdecode.testing.poison import poison_

# Two steps of bf16 between 8 and 16, where the largest logits are.
NEAR_TIE = 0.125
# Requests that may end at a near-tie: the smallest model has many of them, logits being bf16.
MAX_NEAR_TIES = {"k3": 3, "linear": 1, "mini": 1}
NEW_TOKENS = 40


@dataclass
class Plain:
    """Greedy decoding of one prompt, alone: tokens, logits of each, the state behind each."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def _decode(machine: Machine, prompt: Sequence[int]) -> Plain:
    found = Plain(prompt)
    request, logits = machine.start(prompt)
    for _ in range(NEW_TOKENS):
        found.states[request.num_tokens] = machine.state(
            request.slot, request.pages, request.num_tokens
        )
        found.logits.append(logits)
        found.tokens.append(int(logits.argmax()))
        logits = machine.forward(StepBatch((request.take([found.tokens[-1]]),)))[0]
    machine.caches.free_slot(request.slot)
    machine.caches.free_pages(request.pages)
    return found


def _mini(directory: Path) -> Callable[[], Machine]:
    packed = pack_model(CheckpointReader(directory), "rows")
    engine = EngineConfig(page_tokens=16)

    def make() -> Machine:
        caches = Caches.allocate(packed.config, "cpu", 4, 48, 16)
        for pool in (*caches.conv.values(), *caches.recurrent.values(), *caches.pages.values()):
            poison_(pool)
        return Machine(build_auto_plan(packed, caches, engine), caches)

    return make


@dataclass(frozen=True)
class Setup:
    """make: a machine with poisoned memory. plains: decoding of each prompt on one of them."""

    name: str
    make: Callable[[], Machine]
    plains: list[Plain]


@pytest.fixture(
    scope="module",
    params=["k3-deferred-nan", "linear-deferred-bytes", "mini", "k3-recomputed-bytes"],
)
def setup(request: pytest.FixtureRequest, mini_checkpoint: Path) -> Setup:
    name, *forms = request.param.split("-")
    make = _mini(mini_checkpoint) if name == "mini" else make_tiny(name, *forms)
    machine = make()
    return Setup(name, make, [_decode(machine, prompt) for prompt in PROMPTS])


def _script(plain: Plain, position: int, accept: int, count: int) -> tuple[int, ...]:
    """Drafts of which exactly ``accept`` are plain decoding's own."""
    place = position + 1 - len(plain.prompt)
    right = plain.tokens[place : place + accept]
    wrong = (plain.tokens[place + accept : place + accept + 1] or [0])[0]
    vocab = plain.logits[0].numel()
    return (*right, *((wrong + 1 + n) % vocab for n in range(count - len(right))))


def _patterns(num_drafts: int) -> Iterator[tuple[int, int]]:
    """(accepted, drafts): every number of accepted drafts, with a round of none after each."""
    while True:
        for accept in range(num_drafts + 1):
            yield accept, num_drafts
            yield 0, 0


@dataclass
class Follower:
    """One request of a speculative run, held against plain decoding."""

    plain: Plain
    active: ActiveRequest
    pattern: Iterator[tuple[int, int]]
    is_done: bool = False
    near_ties: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        return self.active.token_ids[len(self.plain.prompt) :]

    def propose(self) -> Proposal:
        accept, count = next(self.pattern)
        position = self.active.anchor_position
        self.rounds.append((accept, count))
        return Proposal(position, _script(self.plain, position, accept, count))

    def check(self, machine: Machine, verdict: Verdict) -> None:
        wanted = self.plain.tokens[: len(self.new_tokens)]
        same = [a == b for a, b in zip(self.new_tokens, wanted, strict=False)]
        if not all(same):
            place = same.index(False)
            near_tie(self.plain.logits[place], self.new_tokens[place], NEAR_TIE)
            self.near_ties, self.is_done = 1, True
            return
        assert verdict.accepted == self.rounds[-1][0]
        cached = self.active.anchor_position
        state = machine.state(self.active.slot, self.active.pages, cached)
        state_close(state, self.plain.states[cached], STATE, f"after {cached} tokens")
        # Room for a round of all drafts, whose last one plain decoding has to know.
        self.is_done = len(self.new_tokens) + 9 > NEW_TOKENS


def _follow(
    machine: Machine, plains: Sequence[Plain], num_drafts: Sequence[int]
) -> tuple[list[Follower], Counted]:
    loop = Counted(machine.forward, machine.rollback)
    followers = []
    for plain, drafts in zip(plains, num_drafts, strict=True):
        request, logits = machine.start(plain.prompt)
        tokens = [*plain.prompt, int(logits.argmax())]
        active = ActiveRequest(tokens, request.slot, request.pages)
        followers.append(Follower(plain, active, _patterns(drafts)))
    while running := [one for one in followers if not one.is_done]:
        proposals = [one.propose() for one in running]
        verdicts = run_round(loop, [one.active for one in running], proposals)
        for one, verdict in zip(running, verdicts, strict=True):
            one.check(machine, verdict)
    return followers, loop


@pytest.mark.parametrize("num_drafts", [3, 7])
def test_every_acceptance_by_turns_with_none(setup: Setup, num_drafts: int) -> None:
    near_ties = compared = 0
    for plain in setup.plains:
        (follower,), loop = _follow(setup.make(), [plain], [num_drafts])
        near_ties += follower.near_ties
        compared += len(follower.new_tokens)
        rounds = [accept for accept, count in follower.rounds if count]
        assert loop.stats.rounds == len(rounds)
        assert loop.times.steps == len(follower.rounds)
        assert loop.stats.drafted == sum(count for _, count in follower.rounds) > 0
        if not follower.near_ties:
            assert loop.stats.accepted == sum(rounds)
            assert set(rounds) >= set(range(min(num_drafts, 3) + 1))
    assert near_ties <= MAX_NEAR_TIES[setup.name]
    assert compared > 60


def test_uneven_acceptance_in_a_batch(setup: Setup) -> None:
    """Three requests with 1, 3 and 7 drafts, out of step with each other, in one batch."""
    followers, loop = _follow(setup.make(), setup.plains, [1, 3, 7])
    assert sum(one.near_ties for one in followers) <= MAX_NEAR_TIES[setup.name]
    assert all(len(one.new_tokens) > 5 for one in followers)
    drafted = [count for one in followers for _, count in one.rounds]
    assert loop.stats.rounds == sum(count > 0 for count in drafted)


def test_rounds_without_drafts_are_plain_decoding_bit_for_bit(setup: Setup) -> None:
    plain, machine = setup.plains[0], setup.make()
    loop = Counted(machine.forward, machine.rollback)
    request, logits = machine.start(plain.prompt)
    tokens = [*plain.prompt, int(logits.argmax())]
    active = ActiveRequest(tokens, request.slot, request.pages)
    for place in range(1, 10):
        (verdict,) = run_round(loop, [active], [Proposal(active.anchor_position, ())])
        assert verdict == Verdict(0, plain.tokens[place], 0)
        cached = active.anchor_position
        state = machine.state(active.slot, active.pages, cached)
        for key, expected in plain.states[cached].items():
            bit_equal(state[key], expected, f"{key} after {cached} tokens")
