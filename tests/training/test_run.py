"""A stopped training goes on as if it had not been; what is exported is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3train import export, sizes
from k3train.optimiser import Optimiser, orthogonal, rate_at
from k3train.run import Schedule, train
from k3train.target import Target, is_expert, round_mxfp4
from kdecode.config import ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.model.draft_roster import draft_slots
from kdecode.model.draft_weights import load_draft
from kdecode.model.mxfp4 import dequantise
from kdecode.model.parameters import MoeParameters, Mxfp4
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.weights import CheckpointReader


class Fit:
    """A learner of a few numbers: a matrix, a table and a vector that are to become fixed ones."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"layers.0.o_proj": (4, 6), "embed": (5, 3), "norm": (3,)}
        self.wanted = {s: torch.randn(shape, generator=generator) for s, shape in shapes.items()}
        self.values = {s: torch.zeros(shape).requires_grad_() for s, shape in shapes.items()}

    def state(self) -> dict[str, Tensor]:
        return self.values

    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for slot, value in self.values.items():
                value.copy_(state[slot])

    def _loss(self) -> Tensor:
        return sum(
            ((self.values[slot] - wanted).square().sum() for slot, wanted in self.wanted.items()),
            start=torch.zeros(()),
        )

    def step(self, step: int) -> dict[str, float]:
        loss = self._loss()
        loss.backward()
        return {"loss": float(loss.detach())}

    def held_out(self) -> dict[str, float]:
        return {"held_out": float(self._loss().detach())}


def run(folder: Path, fit: Fit, minutes: float | None = None) -> bool:
    schedule = Schedule(steps=60, peak_rate=0.1, warm_up=5, held_out_every=20)
    return train(
        fit,
        Optimiser(fit.values, weight_decay=0.0),
        schedule,
        folder / "state.pt",
        folder / "log.jsonl",
        minutes=minutes,
        say=lambda _: None,
    )


def test_a_stopped_training_goes_on_to_the_same_end(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
    whole, stopped = Fit(), Fit()
    assert run(folders[0], whole)
    count = 0
    # Without any time, one step is done each time.
    while not run(folders[1], stopped, minutes=0.0):
        count += 1
        stopped = Fit()
    assert count == 59
    for slot, value in whole.values.items():
        assert torch.equal(value, stopped.values[slot])
    logs = [
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    for one, other in zip(*logs, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert [entry["step"] for entry in logs[0] if "held_out" in entry] == [19, 39, 59]
    assert logs[0][-1]["held_out"] < 0.1 * logs[0][0]["loss"]


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (3, 16, 4)])
def test_updates_of_matrices_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sizes_of = torch.linalg.svdvals(orthogonal(matrix))
    assert float(sizes_of.min()) > 0.5
    assert float(sizes_of.max()) < 1.3


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [rate_at(step, 100, 2.0, 10, 0.2) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9:80] == [2.0] * 71
    assert rates[90] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1)
    assert [rate_at(step, 100, 2.0, 10, 0.0) for step in (50, 99)] == [2.0, 2.0]


def test_an_exported_target_is_what_was_trained(tmp_path: Path) -> None:
    document = released_config(PRESETS["mini"])
    config = ModelConfig.from_checkpoint(document)
    target = Target(config, seed=4)
    tokens = [bytes([value]) for value in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    export.export_target(
        tmp_path, document, target.state(), tokens[: config.vocab_size - 256], sizes.generation()
    )
    model = CheckpointReader(tmp_path).load_model()
    layer = model.layers[1]
    state = target.state()
    assert isinstance(layer.mlp, MoeParameters)
    for slot, stack in state.items():
        if slot.startswith("layers.1.mlp") and is_expert(slot):
            rounded = round_mxfp4(stack)
            for wanted, got in zip(rounded, getattr(layer.mlp, slot[-2:]), strict=True):
                assert isinstance(got, Mxfp4)
                assert torch.equal(dequantise(got).float(), wanted)
    assert torch.equal(model.embed, state["embed"].bfloat16())
    assert torch.equal(layer.attention.o_proj, state["layers.1.attention.o_proj"].bfloat16())
    assert torch.equal(layer.attention.a_log, state["layers.1.attention.a_log"])


def test_a_training_goes_on_from_an_exported_target(tmp_path: Path) -> None:
    """Every number that is loaded is the one in the file, and exporting it changes none."""
    target = Target(sizes.model_config(), seed=4)
    tokens = [bytes([value]) for value in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    tokens = tokens[: target.config.vocab_size - 256]
    loaded = []
    for name in ("first", "second"):
        folder = tmp_path / name
        export.export_target(folder, sizes.document(), target.state(), tokens, sizes.generation())
        loaded.append(export.load_target(folder))
        target.load(loaded[-1])
    trained = Target(sizes.model_config(), seed=4).state()
    for slot, value in trained.items():
        assert torch.equal(loaded[0][slot], loaded[1][slot]), slot
        if is_expert(slot):
            assert torch.equal(loaded[0][slot], round_mxfp4(value))
        else:
            assert torch.allclose(loaded[0][slot], value, rtol=2**-8)


def test_an_exported_draft_is_what_was_trained(tmp_path: Path) -> None:
    document = sizes.draft_document()
    config = DraftConfig.from_checkpoint(document)
    config.check_target(sizes.model_config())
    generator = torch.Generator().manual_seed(0)
    state = {
        slot: torch.randn(spec.shape, generator=generator)
        for slot, spec in draft_slots(config).items()
        if slot != "embed"
    }
    export.export_draft(tmp_path, document, state)
    loaded = load_draft(tmp_path)
    assert torch.equal(loaded.context_proj, state["context_proj"].bfloat16())
    assert loaded.confidence is not None
    assert torch.equal(loaded.confidence.bias, state["confidence.bias"].bfloat16())
