"""Rows that are recorded and then committed, against the same rows run plainly, one by one.

The oracle is roll-back by slots: a state for every row, made by plain steps, of which one stays.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import attention_cases as cases
import pytest
import torch

from kdecode.kernels.common.native import Pool, supported_isas
from kdecode.kernels.common.step import RowEffects
from kdecode.kernels.kda_commit import cpu
from kdecode.kernels.kda_commit.move import move
from kdecode.kernels.kda_commit.op import CONTRACT
from kdecode.kernels.kda_front import cpu as front
from kdecode.kernels.kda_front.op import CONTRACT as FRONT
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poison_, poisoned

ISAS = supported_isas()
LAYER = 2
NUM_SLOTS = 6


class Machine:
    """A layer's slots; all but those in use are NaN, or one byte over and over."""

    def __init__(self, config, setting, slots, fill="nan"):
        self.config, self.setting = config, setting
        kda = config.kda
        state_shape = (NUM_SLOTS, kda.num_heads, kda.head_dim, kda.head_dim)
        self.window = self._filled((NUM_SLOTS, 3, 3 * kda.width), torch.bfloat16, fill)
        self.state = self._filled(state_shape, torch.float32, fill)
        for slot in slots:
            self.window[slot] = cases.rows_of(self.window.shape[1:], 100 + slot)
            self.state[slot] = cases.rows_of(state_shape[1:], 200 + slot, torch.float32)
        self.fill = fill

    @staticmethod
    def _filled(shape, dtype, fill):
        tensor = poisoned(shape, dtype)
        if fill == "bytes":
            tensor.view(torch.uint8).fill_(0x3D)
        return tensor

    def _prepared(self, inputs, slots, rows_per_request):
        rows = len(slots)
        buffers = cases.buffers_of(self.config, LAYER, inputs, self.setting)
        buffers["row_slot"] = torch.tensor(slots, dtype=torch.int32)
        buffers["kept_rows"] = torch.zeros(rows // rows_per_request, 3, dtype=torch.int32)
        buffers.caches = SimpleNamespace(conv={LAYER: self.window}, recurrent={LAYER: self.state})
        kda = self.config.kda
        heads = (rows, kda.num_heads, kda.head_dim)
        buffers.effects = {
            LAYER: RowEffects(
                *(self._filled(heads, torch.float32, self.fill) for _ in range(3)),
                self._filled((rows, 3 * kda.width), torch.bfloat16, self.fill),
            )
        }
        problem = self.setting.problem(self.config, LAYER, rows)
        problem = replace(problem, rows_per_request=rows_per_request)
        assert front.refuse(problem) == cpu.refuse(problem) == []
        packed = cases.pack_layer(cases.layer_parameters(self.config, LAYER), self.config)
        return buffers, front.prepare(problem, packed, buffers), problem

    def plain(self, inputs, slot):
        """One row; the buffers that it wrote."""
        buffers, step, _ = self._prepared(inputs, [slot], 1)
        cases.run_poisoned(step, buffers)
        return buffers

    def verify(self, inputs, slots, rows_per_request):
        """The rows of some slots, recorded; the buffers, and the step that commits them."""
        buffers, step, problem = self._prepared(inputs, slots, rows_per_request)
        cases.run_poisoned(step, buffers)
        return buffers, cpu.prepare(problem, None, buffers)


def _states_by_slots(config, setting, inputs, slots):
    """For each slot the window and state behind each of its rows, and every row's buffers."""
    machine = Machine(config, setting, set(slots))
    states = {slot: [(machine.window[slot].clone(), machine.state[slot].clone())] for slot in slots}
    rows = []
    for row, slot in enumerate(slots):
        rows.append(machine.plain(inputs[:, row : row + 1], slot))
        states[slot].append((machine.window[slot].clone(), machine.state[slot].clone()))
    return states, rows


@pytest.fixture(scope="module")
def pool():
    return Pool(2)


@pytest.mark.parametrize("fill", ["nan", "bytes"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("form", "size", "slots"),
    [
        ("k3", "small", [4, 4, 4, 4, 1, 1, 1, 1]),
        ("linear", "uneven", [3] * 8),
        ("k3", "wide", [0, 0, 0, 5, 5, 5]),
        ("linear", "small", [2, 2, 5, 5, 0, 0, 1, 1]),
    ],
)
def test_every_number_of_kept_rows_is_that_many_plain_steps(isa, form, size, slots, fill, pool):
    config, setting = cases.model(form, size), cases.Setting(isa, pool)
    inputs = cases.inputs_of(config, LAYER, len(slots))
    states, plain = _states_by_slots(config, setting, inputs, slots)
    own = list(dict.fromkeys(slots))
    per_request = len(slots) // len(own)
    for kept in range(1, per_request + 1):
        machine = Machine(config, setting, own, fill)
        before = machine.window.clone(), machine.state.clone()
        buffers, commit = machine.verify(inputs, slots, per_request)
        for row, expected in enumerate(plain):
            for name in FRONT.writes:
                bit_equal(buffers[name][row], expected[name][0], f"row {row} {name}")
        bit_equal(machine.window, before[0], "windows after the step")
        bit_equal(machine.state, before[1], "states after the step")
        # Uneven: the first slot keeps `kept` rows, each other one fewer, down to one.
        counts = [max(1, kept - place) for place in range(len(own))]
        effects = buffers.effects[LAYER]
        for place, count in enumerate(counts):
            first = place * per_request
            buffers["kept_rows"][place] = torch.tensor([own[place], first, count])
            for tensor in (effects.keys, effects.decays, effects.corrections, effects.samples):
                poison_(tensor[first + count : first + per_request])
        commit.run()
        for place, slot in enumerate(own):
            window, state = states[slot][counts[place]]
            bit_equal(machine.window[slot], window, f"window of slot {slot}, {counts[place]} rows")
            bit_equal(machine.state[slot], state, f"state of slot {slot}, {counts[place]} rows")
        free = [slot for slot in range(NUM_SLOTS) if slot not in own]
        bit_equal(machine.window[free], before[0][free], "windows of other slots")
        bit_equal(machine.state[free], before[1][free], "states of other slots")


def test_a_slot_without_a_line_stays(pool):
    """A request that ended between step and commit has no line."""
    config, setting = cases.model("k3", "small"), cases.Setting(ISAS[0], pool)
    slots = [1, 1, 3, 3]
    inputs = cases.inputs_of(config, LAYER, len(slots))
    states, _ = _states_by_slots(config, setting, inputs, slots)
    machine = Machine(config, setting, slots)
    buffers, commit = machine.verify(inputs, slots, 2)
    buffers["kept_rows"][0] = torch.tensor([3, 2, 1])
    commit.run()
    for slot, kept in ((1, 0), (3, 1)):
        bit_equal(machine.window[slot], states[slot][kept][0], f"window of slot {slot}")
        bit_equal(machine.state[slot], states[slot][kept][1], f"state of slot {slot}")


@pytest.mark.parametrize("kept", range(1, 6))
def test_the_form_in_torch_is_its_solution(kept, pool):
    config, setting = cases.model("linear", "uneven"), cases.Setting(ISAS[0], pool)
    slots = [2] * 5
    inputs = cases.inputs_of(config, LAYER, len(slots))
    states, _ = _states_by_slots(config, setting, inputs, slots)
    machine = Machine(config, setting, [2])
    buffers, _ = machine.verify(inputs, slots, 5)
    effects = buffers.effects[LAYER]
    for tensor in (effects.keys, effects.decays, effects.corrections, effects.samples):
        poison_(tensor[kept:])
    move(machine.window[2], machine.state[2], effects, kept)
    bit_equal(machine.window[2], states[2][kept][0], "window")
    assert_close(machine.state[2], states[2][kept][1], CONTRACT.tolerance, "state")
    assert bool(torch.isnan(machine.state[[0, 1, 3, 4, 5]]).all())
