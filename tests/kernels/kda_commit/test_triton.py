"""Rows that are recorded and then committed in Triton: the bits of the same rows run one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import kda_triton_cases as kda
import pytest
import torch
import triton_cases as cases

from kdecode.kernels.kda_commit import triton_impl
from kdecode.testing.compare import bit_equal
from kdecode.testing.poison import poison_

# Recorded in both, so that one launch moves two layers.
LAYERS = (0, 1)


@lru_cache
def case_of(form: str, head_dim: int) -> cases.Case:
    return cases.make_case(kda.config_of(form, head_dim, heads=1))


def committer(slots: kda.Slots, buffers, rows: int, each: int):
    """The step that moves `LAYERS`."""
    buffers.effects = {layer: buffers.effects[layer] for layer in LAYERS}
    problem = slots.case.problem(None, rows, each)
    assert triton_impl.refuse(problem) == []
    return triton_impl.prepare(problem, None, buffers)


def keep(buffers, lines) -> None:
    buffers["kept_rows"].copy_(torch.tensor(lines, dtype=torch.int32))


def expect(slots: kda.Slots, wanted: list) -> None:
    for slot, state in enumerate(wanted):
        for ours, theirs in zip(slots.state(slot), state, strict=True):
            bit_equal(ours.cpu(), theirs.cpu(), f"slot {slot}")


@pytest.mark.parametrize(("form", "head_dim", "rows"), [("k3", 16, 5), ("linear", 48, 2)])
def test_every_number_of_kept_rows_is_that_many_plain_steps(form, head_dim, rows):
    case = case_of(form, head_dim)
    proj = kda.projections(case.config, rows)
    plain = kda.Slots(case, [2])
    for kept in range(1, rows + 1):
        plain.run(proj[kept - 1 : kept], [2], layers=LAYERS)
        verified = kda.Slots(case, [2])
        buffers = verified.run(proj, [2] * rows, each=rows, layers=LAYERS)
        for layer in LAYERS:
            effects = buffers.effects[layer]
            for tensor in (effects.keys, effects.decays, effects.corrections, effects.samples):
                poison_(tensor[kept:])
        keep(buffers, [(2, 0, kept)])
        committer(verified, buffers, rows, rows).run()
        expect(verified, [plain.state(slot) for slot in range(6)])


def test_requests_keep_different_numbers_of_rows_twice():
    """One prepared step; a request whose rows are all dropped has a line of zeros."""
    case, each = case_of("k3", 16), 3
    verified, plain = kda.Slots(case, [5, 0, 3]), kda.Slots(case, [5, 0, 3])
    buffers = verified.run(
        kda.projections(case.config, 9), [5] * 3 + [0] * 3 + [3] * 3, each, LAYERS
    )
    step = committer(verified, buffers, 9, each)
    for turn, kept in enumerate([{5: 1, 3: 3}, {0: 2, 5: 3, 3: 1}]):
        slots = [slot for slot in (3, 5, 0) for _ in range(each)]
        proj = kda.projections(case.config, len(slots), seed=turn)
        again = verified.run(proj, slots, each, LAYERS)
        for layer in LAYERS:
            for name in ("keys", "decays", "corrections", "samples"):
                source = getattr(again.effects[layer], name)
                getattr(buffers.effects[layer], name).copy_(source)
        lines = [(slot, slots.index(slot), count) for slot, count in kept.items()]
        keep(buffers, lines + [(0, 0, 0)] * (3 - len(lines)))
        step.run()
        for slot, first, count in lines:
            for row in range(first, first + count):
                plain.run(proj[row : row + 1], [slot], layers=LAYERS)
        expect(verified, [plain.state(slot) for slot in range(6)])


def test_refusals():
    case = case_of("k3", 16)
    problem = replace(case.problem(1, 1), rows=None)
    bad = replace(case.config, kda=replace(case.config.kda, conv_width=3))
    text = "\n".join(triton_impl.refuse(replace(problem, config=bad)))
    for part in ("takes any number", "this problem is layer 1", "model's has 3"):
        assert part in text


def test_layers_at_odd_addresses_are_refused():
    tensors = [torch.empty(64)[offset : offset + 8] for offset in (0, 1)]
    with pytest.raises(ValueError, match="have to be multiples of 64"):
        triton_impl._distances(tensors)
