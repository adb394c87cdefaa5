"""kda_front against the reference stages that it covers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import attention_cases as cases
import pytest
import torch

from kdecode.kernels.common.native import Pool, supported_isas
from kdecode.kernels.contract import Tolerance
from kdecode.kernels.kda_front import cpu
from kdecode.kernels.kda_front.op import CONTRACT
from kdecode.model import reference as ref
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poisoned

ISAS = supported_isas()
LAYER = 2  # after one snapshot
STATE = Tolerance(rtol=2e-2, atol=1e-2, rms_ratio=1e-2)


@pytest.fixture(scope="module")
def pool():
    return Pool(2)


class Run:
    """One prepared step on its own caches: poisoned, but for the slots in use."""

    def __init__(self, config, setting, inputs, slots, num_slots=12):
        self.config, self.slots = config, slots
        self.parameters = cases.layer_parameters(config, LAYER)
        kda = config.kda
        self.window = poisoned((num_slots, 3, 3 * kda.width), torch.bfloat16)
        state_shape = (num_slots, kda.num_heads, kda.head_dim, kda.head_dim)
        self.state = poisoned(state_shape, torch.float32)
        for slot in set(slots):
            self.window[slot] = cases.rows_of(self.window.shape[1:], 100 + slot)
            self.state[slot] = cases.rows_of(state_shape[1:], 200 + slot, torch.float32)
        self.buffers = cases.buffers_of(config, LAYER, inputs, setting)
        self.buffers["row_slot"] = torch.tensor(slots, dtype=torch.int32)
        self.buffers.caches = SimpleNamespace(
            conv={LAYER: self.window}, recurrent={LAYER: self.state}
        )
        problem = setting.problem(config, LAYER, len(slots))
        assert cpu.refuse(problem) == []
        packed = cases.pack_layer(self.parameters, config)
        self.step = cpu.prepare(problem, packed, self.buffers)

    def run(self):
        cases.run_poisoned(self.step, self.buffers)


def reference_step(run, inputs, window, state, rounding):
    """The covered stages for the rows of one slot: buffers by name, window, state."""
    p, config = run.parameters, run.config
    mixed = ref.attn_mix(p.attn_mix, inputs[-1], inputs[:-1], config.rms_eps, rounding)
    attn_in = ref.attn_norm(mixed, p.input_norm, config.rms_eps, rounding)
    proj = ref.kda_in_proj(p.attention, attn_in, rounding)
    qkv, window = ref.kda_conv(p.attention, proj, window, rounding)
    g, beta = ref.kda_gate(p.attention, config.kda, proj, rounding)
    out, state = ref.kda_step(config.kda, qkv, g, beta, state, rounding)
    attn_out = ref.kda_out_norm(p.attention, out, proj, config.rms_eps, rounding)
    values = {
        "attn_mix": mixed,
        "attn_in": attn_in,
        "kda_proj": proj,
        "kda_qkv": qkv,
        "kda_decay": g,
        "kda_beta": beta,
        "kda_out": out,
        "attn_out": attn_out,
    }
    return values, window, state


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["k3", "linear"])
@pytest.mark.parametrize(
    ("size", "slots"),
    [("small", [5]), ("small", [3, 0, 7, 7, 7, 1, 9, 11]), ("uneven", [2, 4, 4]), ("wide", [1, 0])],
)
def test_values_and_state(isa, form, size, slots, pool):
    config = cases.model(form, size)
    inputs = cases.inputs_of(config, LAYER, len(slots))
    run = Run(config, cases.Setting(isa, pool), inputs, slots)
    window_before, state_before = run.window.clone(), run.state.clone()
    run.run()
    for slot in dict.fromkeys(slots):
        rows = [row for row, other in enumerate(slots) if other == slot]
        values, window, state = reference_step(
            run, inputs[:, rows], window_before[slot], state_before[slot], ref.ROUNDED
        )
        for name, gold in values.items():
            actual = run.buffers[name][rows]
            assert_close(actual, gold.view(actual.shape), CONTRACT.tolerance, f"{slot} {name}")
        # The newest samples are this step's own projections, bit for bit.
        raw = torch.cat(
            [window_before[slot], run.buffers["kda_proj"][rows, : 3 * config.kda.width]]
        )
        bit_equal(run.window[slot], raw[-3:], f"slot {slot} window")
        assert_close(run.window[slot], window, CONTRACT.tolerance, f"slot {slot} window")
        assert_close(run.state[slot], state, STATE, f"slot {slot} state")
    free = [slot for slot in range(len(run.state)) if slot not in slots]
    bit_equal(run.window[free], window_before[free], "windows of other slots")
    bit_equal(run.state[free], state_before[free], "states of other slots")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["k3", "linear"])
def test_a_row_does_not_depend_on_the_others(isa, form, pool):
    """Eight rows, two of them consecutive tokens of one slot, equal eight steps of one row."""
    config = cases.model(form, "uneven")
    slots = [3, 0, 7, 7, 2, 1, 9, 11]
    inputs = cases.inputs_of(config, LAYER, len(slots))
    setting = cases.Setting(isa, pool)
    together = Run(config, setting, inputs, slots)
    together.run()
    window, state = {}, {}
    for row, slot in enumerate(slots):
        alone = Run(config, setting, inputs[:, row : row + 1], [slot])
        if slot in state:
            alone.window[slot], alone.state[slot] = window[slot], state[slot]
        alone.run()
        window[slot], state[slot] = alone.window[slot].clone(), alone.state[slot].clone()
        for name in CONTRACT.writes:
            bit_equal(together.buffers[name][row], alone.buffers[name][0], f"row {row} {name}")
    for slot in set(slots):
        bit_equal(together.window[slot], window[slot], f"slot {slot} window")
        bit_equal(together.state[slot], state[slot], f"slot {slot} state")


def test_threads_do_not_change_a_bit(pool):
    config = cases.model("linear", "small")
    slots = [3, 0, 7]
    inputs = cases.inputs_of(config, LAYER, len(slots))
    runs = []
    for threads in (Pool(1), pool, Pool(5, True)):
        runs.append(Run(config, cases.Setting(ISAS[0], threads), inputs, slots))
        runs[-1].run()
    for other in runs[1:]:
        for name in CONTRACT.writes:
            bit_equal(other.buffers[name], runs[0].buffers[name], name)
        bit_equal(other.state[slots], runs[0].state[slots], "state")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["k3", "linear"])
def test_state_drift_over_256_steps(isa, form, pool):
    """The state stays with the fp64 recurrence fed with the same projections."""
    config = cases.model(form, "small")
    kda, steps = config.kda, 256
    inputs = cases.rows_of((steps, config.hidden_size), 7)
    run = Run(config, cases.Setting(isa, pool), cases.inputs_of(config, LAYER, 1), [4])
    window, state = run.window[4].clone(), run.state[4].double()
    projections = []
    for row in inputs:
        run.buffers["prefix"][0] = row
        run.run()
        projections.append(run.buffers["kda_proj"][0].clone())
    proj = torch.stack(projections)
    p = run.parameters.attention
    qkv, window = ref.kda_conv(p, proj, window, ref.ROUNDED)
    g, beta = ref.kda_gate(p, kda, proj, ref.ROUNDED)
    _, state = ref.kda_step(kda, qkv, g.double(), beta.double(), state, ref.GOLD)
    bit_equal(run.window[4], window, "window")
    # fp32 arithmetic on inputs of which a few differ by a bf16 rounding.
    assert_close(run.state[4], state, Tolerance(1e-3, 1e-3, 1e-3), "state")


def test_refusals(pool):
    config = cases.model("k3", "small")
    setting = cases.Setting(ISAS[0], pool)
    bad = replace(config, kda=replace(config.kda, head_dim=24, conv_width=3))
    reasons = cpu.refuse(replace(setting.problem(bad, LAYER, 65), device="cuda"))
    text = "\n".join(reasons)
    assert len(reasons) == 4
    for part in ("device is cuda", "this plan has 65", "model's has 3", "model's have 24"):
        assert part in text


def test_row_major_weights_are_refused(pool):
    config = cases.model("k3", "small")
    inputs = cases.inputs_of(config, LAYER, 1)
    run = Run(config, cases.Setting(ISAS[0], pool), inputs, [0])
    packed = cases.pack_layer(run.parameters, config)
    packed.attention.f_b = replace(packed.attention.f_b, format="rows")
    problem = cases.Setting(ISAS[0], pool).problem(config, LAYER, 1)
    with pytest.raises(ValueError, match="this one is in rows"):
        cpu.prepare(problem, packed, run.buffers)
