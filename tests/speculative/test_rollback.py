"""What a round leaves when it is refused, interrupted or told a wrong number of rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from auto_cases import tokens_of
from round_cases import PROMPTS, STATE, ActiveRequest, Counted, Machine, make_tiny, run_round
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.open_rows import UncommittedError
from kdecode.speculative.accept import verify_greedy
from kdecode.speculative.checkpoint import SlotCheckpoints
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, Verdict
from kdecode.testing.compare import bit_equal, state_close
from kdecode.testing.poison import poison_


@pytest.fixture
def tiny() -> tuple[Machine, ActiveRequest, Counted]:
    machine = make_tiny("k3")()
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
    (verdict,) = run_round(loop, [active], [Proposal(active.anchor_position, drafts)], judge)
    assert (verdict.accepted, verdict.is_synthetic) == (2, True)
    assert loop.stats.is_synthetic
    assert active.token_ids[-3:-1] == [7, 8]
    other = make_tiny("k3")()
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
        run_round(loop, [active], [stale])
    with pytest.raises(ValueError, match="1 requests have 0 proposals"):
        run_round(loop, [active], [])
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
    machine = make_tiny("linear")()
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
        run_round(loop, [active], [Proposal(cached, (1, 2))], interrupted)
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
