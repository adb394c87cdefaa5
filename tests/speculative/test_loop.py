"""Rounds over the standard path: any acceptance leaves tokens and state of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from auto_cases import Request, Session, make_model, tokens_of
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import UncommittedError
from kdecode.config import EngineConfig
from kdecode.decode.auto import build_auto_plan, run_standard
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.contract import Tolerance
from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.speculative.accept import verify_greedy
from kdecode.speculative.checkpoint import SlotCheckpoints
from kdecode.speculative.loop import Judge, SpeculativeLoop, judge_greedily
from kdecode.speculative.rollback import Deferred, Recomputation
from kdecode.speculative.stats import RoundStats
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, Rollback, Verdict
from kdecode.testing.compare import bit_equal, near_tie, state_close
from kdecode.testing.poison import poison_

# A step of several rows rounds in another order than steps of one, and a rounding may change an
# expert: RMS ratios of up to 0.044, 0.024 and 0.015 were seen. A window that is off by one token
# has 0.66 and more, a recurrent state 0.076 and more.
STATE = {
    "window": Tolerance(rtol=0.5, atol=0.5, rms_ratio=0.1),
    "recurrent": Tolerance(rtol=0.5, atol=0.3, rms_ratio=0.05),
    "rows": Tolerance(rtol=0.5, atol=0.5, rms_ratio=0.05),
}
# Two steps of bf16 between 8 and 16, where the largest logits are.
NEAR_TIE = 0.125
# Requests that may end at a near-tie: the smallest model has many of them, logits being bf16.
MAX_NEAR_TIES = {"k3": 3, "linear": 1, "mini": 1}
PROMPTS = (tokens_of(5, 1), tokens_of(17, 2), tokens_of(1, 3))
NEW_TOKENS = 40


@dataclass
class Machine:
    """Caches and the plan that moves them."""

    plan: DecodePlan
    caches: Caches
    form: str = "deferred"

    def forward(self, batch: StepBatch) -> Tensor:
        # A copy, as a later step overwrites the buffer.
        return run_standard(self.plan, batch).clone()

    @property
    def rollback(self) -> Rollback:
        if self.form == "recomputed":
            return Recomputation(self.forward, self.caches)
        return Deferred(self.caches)

    def start(self, prompt: Sequence[int]) -> tuple[Request, Tensor]:
        """A request whose prompt has run, and the logits behind it."""
        request = Request(self.caches.allocate_slot(), self.caches.allocate_pages(100))
        logits = self.forward(StepBatch((request.take(list(prompt)),)))
        request.is_decode = True
        return request, logits[0]

    def state(self, slot: int, pages: tuple[int, ...], num_tokens: int) -> dict[str, Tensor]:
        caches = self.caches
        found = {f"window.{n}": x[slot].clone() for n, x in caches.conv.items()}
        found |= {f"recurrent.{n}": x[slot].clone() for n, x in caches.recurrent.items()}
        for layer, pool in caches.pages.items():
            rows = pool[list(pages)].flatten(0, 1)[:num_tokens]
            found[f"rows.{layer}"] = rows.clone()
        return found


@dataclass
class ActiveRequest:
    """A request past its prompt. The caches hold all of its tokens but the anchor, the last."""

    token_ids: list[int]
    slot: int
    pages: tuple[int, ...]

    @property
    def anchor_position(self) -> int:
        return len(self.token_ids) - 1

    @property
    def step(self) -> StepRequest:
        anchor = (self.token_ids[-1],)
        return StepRequest(anchor, self.anchor_position, self.slot, self.pages, is_decode=True)


@dataclass
class Counted(SpeculativeLoop):
    """A loop whose verdicts are counted."""

    stats: RoundStats = field(default_factory=RoundStats)


def _round(
    loop: Counted,
    actives: Sequence[ActiveRequest],
    proposals: Sequence[Proposal],
    judge: Judge = judge_greedily,
) -> list[Verdict]:
    """One round, and the requests' tokens moved on."""
    verdicts = loop.round(StepBatch(tuple(one.step for one in actives)), proposals, judge)
    for one, proposal, verdict in zip(actives, proposals, verdicts, strict=True):
        new = verdict.tokens(proposal)
        one.token_ids += new
        loop.stats.record(verdict, len(new))
    return verdicts


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


def _tiny(model_form: str, rollback: str = "deferred", fill: str = "nan") -> Callable[[], Machine]:
    model = make_model(model_form)

    def make() -> Machine:
        session = Session(model)
        if fill == "bytes":
            # What a wrong read finds is then finite, and nowhere near right.
            for pool in session.pools:
                pool.view(torch.uint8).fill_(0x3D)
        return Machine(session.plan, session.caches, rollback)

    return make


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
    make = _mini(mini_checkpoint) if name == "mini" else _tiny(name, *forms)
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
        verdicts = _round(loop, [one.active for one in running], proposals)
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
        (verdict,) = _round(loop, [active], [Proposal(active.anchor_position, ())])
        assert verdict == Verdict(0, plain.tokens[place], 0)
        cached = active.anchor_position
        state = machine.state(active.slot, active.pages, cached)
        for key, expected in plain.states[cached].items():
            bit_equal(state[key], expected, f"{key} after {cached} tokens")


@pytest.fixture
def tiny() -> tuple[Machine, ActiveRequest, Counted]:
    machine = _tiny("k3")()
    request, logits = machine.start(PROMPTS[0])
    tokens = [*PROMPTS[0], int(logits.argmax())]
    active = ActiveRequest(tokens, request.slot, request.pages)
    return machine, active, Counted(machine.forward, machine.rollback)


def test_synthetic_acceptance_takes_any_draft(
    tiny: tuple[Machine, ActiveRequest, Counted],
) -> None:
    """The stated run is committed whatever it is, and marked; the caches hold exactly it."""
    machine, active, loop = tiny
    rates = (1.0, 1.0, 0.0)

    def judge(index: int, proposal: Proposal, logits: Tensor) -> Verdict:
        assert index == 0
        best = logits.argmax(-1).tolist()
        streams = Streams(0, proposal.anchor_position)
        return verify_greedy(proposal, best, streams, rates)

    drafts = (7, 8, 9)
    (verdict,) = _round(loop, [active], [Proposal(active.anchor_position, drafts)], judge)
    assert (verdict.accepted, verdict.is_synthetic) == (2, True)
    assert loop.stats.is_synthetic
    assert active.token_ids[-3:-1] == [7, 8]
    other = _tiny("k3")()
    request, _ = other.start(active.token_ids[:-1])
    expected = other.state(request.slot, request.pages, active.anchor_position)
    found = machine.state(active.slot, active.pages, active.anchor_position)
    state_close(found, expected, STATE, "state")


def test_proposals_of_another_round_run_nothing(
    tiny: tuple[Machine, ActiveRequest, Counted],
) -> None:
    machine, active, loop = tiny
    before = machine.state(active.slot, active.pages, active.anchor_position)
    stale = Proposal(active.anchor_position - 1, (3,))
    with pytest.raises(ValueError, match=r"request 0 has its anchor at 4; .* at 5"):
        _round(loop, [active], [stale])
    with pytest.raises(ValueError, match="1 requests have 0 proposals"):
        _round(loop, [active], [])
    after = machine.state(active.slot, active.pages, active.anchor_position)
    for key, x in before.items():
        bit_equal(after[key], x, key)
    assert loop.stats.rounds == 0


def test_only_the_state_that_was_saved_is_restored(
    tiny: tuple[Machine, ActiveRequest, Counted],
) -> None:
    machine, active, _ = tiny
    checkpoints = SlotCheckpoints(machine.caches)
    with pytest.raises(LookupError, match="the saved one is absent"):
        checkpoints.restore(active.slot, 5)
    checkpoints.save(active.slot, 5)
    before = machine.state(active.slot, active.pages, 5)
    for pool in (*machine.caches.conv.values(), *machine.caches.recurrent.values()):
        poison_(pool)
    with pytest.raises(LookupError, match="after 6 tokens; the saved one is that after 5"):
        checkpoints.restore(active.slot, 6)
    checkpoints.restore(active.slot, 5)
    after = machine.state(active.slot, active.pages, 5)
    for key, x in before.items():
        bit_equal(after[key], x, key)
    others = [n for n in range(machine.caches.num_slots) if n != active.slot]
    for pool in machine.caches.recurrent.values():
        assert bool(torch.isnan(pool[others]).all())
    checkpoints.forget(active.slot)
    with pytest.raises(LookupError, match="absent"):
        checkpoints.restore(active.slot, 5)


def test_logits_of_every_row_or_of_the_last() -> None:
    machine = _tiny("linear")()
    tokens = tokens_of(4, 9)
    slots = [machine.caches.allocate_slot() for _ in range(3)]
    pages = [machine.caches.allocate_pages(10) for _ in range(3)]

    def step(*modes: tuple[bool, bool]) -> Tensor:
        for slot in slots:
            machine.caches.clear_slot(slot)
        parts = zip(slots, pages, modes, strict=True)
        return machine.forward(
            StepBatch(
                tuple(
                    StepRequest(tuple(tokens), 0, slot, own, False, needs_logits=n, all_logits=a)
                    for slot, own, (n, a) in parts
                )
            )
        )

    every = step((True, True), (True, True), (True, True)).view(3, 4, -1)
    mixed = step((True, False), (False, False), (True, True))
    assert torch.equal(mixed, torch.cat([every[0, 3:], every[2]]))
    assert not torch.equal(every[0, 0], every[0, 1])
    assert len({tuple(row) for row in itertools.chain(*every[:1].tolist())}) == 4


@pytest.mark.parametrize(("rows", "message"), [((0,), "0 rows"), ((4,), "4 rows"), ((), "have 0")])
def test_a_number_of_rows_that_the_step_did_not_have_moves_nothing(
    tiny: tuple[Machine, ActiveRequest, Counted], rows: tuple[int, ...], message: str
) -> None:
    machine, active, _ = tiny
    rollback = machine.rollback
    part = StepRequest((1, 2, 3), active.anchor_position, active.slot, active.pages, True)
    batch = rollback.before(StepBatch((part,)))
    machine.forward(batch)
    before = machine.state(active.slot, active.pages, 8)
    with pytest.raises(ValueError, match=message):
        rollback.keep(batch, rows)
    after = machine.state(active.slot, active.pages, 8)
    for key, x in before.items():
        bit_equal(after[key], x, key)


def test_a_round_that_is_interrupted_leaves_the_slot_as_it_was(
    tiny: tuple[Machine, ActiveRequest, Counted],
) -> None:
    """An error or an abort between step and commit: no draft is in any state."""
    machine, active, loop = tiny
    cached = active.anchor_position
    before = machine.state(active.slot, active.pages, cached)

    def interrupted(index: int, proposal: Proposal, logits: Tensor) -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _round(loop, [active], [Proposal(cached, (1, 2))], interrupted)
    after = machine.state(active.slot, active.pages, cached)
    for key, x in before.items():
        bit_equal(after[key], x, key)
    step = StepBatch((StepRequest((1,), cached, active.slot, active.pages, True),))
    with pytest.raises(UncommittedError, match=rf"slots \[{active.slot}\] were verified"):
        machine.forward(step)
    machine.caches.free_slot(active.slot)
    assert not machine.caches.open_rows.slots
    assert machine.caches.allocate_slot() == active.slot
    machine.forward(StepBatch((StepRequest((1,), 0, active.slot, active.pages, False),)))


@pytest.mark.parametrize("kept", [0, 4, -1])
def test_a_count_out_of_range_moves_no_slot(
    tiny: tuple[Machine, ActiveRequest, Counted], kept: int
) -> None:
    machine, active, _ = tiny
    part = StepRequest((1, 2, 3), 5, active.slot, active.pages, True, is_verify=True)
    machine.forward(StepBatch((part,)))
    before = machine.state(active.slot, active.pages, 5)
    with pytest.raises(ValueError, match=f"{kept} rows of KDA slot {active.slot} cannot be kept"):
        machine.caches.commit({active.slot: kept})
    with pytest.raises(ValueError, match="slot 3 are to be kept; slots with open rows are"):
        machine.caches.commit({active.slot: 2, 3: 1})
    after = machine.state(active.slot, active.pages, 5)
    for key, x in before.items():
        bit_equal(after[key], x, key)
    assert machine.caches.commit({active.slot: 2}) == {active.slot: 7}
    assert not torch.equal(
        machine.state(active.slot, active.pages, 5)["recurrent.0"], before["recurrent.0"]
    )
    with pytest.raises(ValueError, match="slots with open rows are \\[\\]"):
        machine.caches.commit({active.slot: 2})
