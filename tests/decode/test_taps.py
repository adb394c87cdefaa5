"""Taps of a plan's run: the layers that were asked for, and the run itself unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from auto_cases import Model, Session, make_model, tokens_of
from cuda_cases import deployment as cuda_deployment
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig, TapStream
from kdecode.decode.auto import load_step
from kdecode.decode.latency_specialized import describe
from kdecode.decode.plan import DecodePlan, Step
from kdecode.decode.runner import StepRunner, deployment_of, resolve
from kdecode.decode.taps import Taps
from kdecode.kernels.contract import Tolerance
from kdecode.model import draft_reference
from kdecode.model.draft_synthesis import draft_document
from kdecode.model.layout import PackedModel, pack_model
from kdecode.model.outline import outline_model
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.reference import ROUNDED, Options, RequestState, forward
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import assert_close, bit_equal

STREAMS: tuple[TapStream, ...] = ("prefix", "attn_res")
MINI = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))
# Roundings of five layers, in rows of unit size and more.
# Over 16 prompts the worst element is off by up to 0.19, where a rounding moves an expert's weight;
# their RMS ratios are 0.005 to 0.026.
NEAR = Tolerance(rtol=0.1, atol=0.25, rms_ratio=0.04)


def _draft(taps: tuple[int, ...], stream: TapStream) -> DraftConfig:
    config = DraftConfig.from_checkpoint(draft_document("inferact", MINI))
    return dataclasses.replace(config, taps=taps, tap_stream=stream)


def _tagging(plan: DecodePlan) -> DecodePlan:
    """The plan with steps that write their layer's number, or 100 behind the last layer."""

    def tag(step: Step) -> Callable[[], None]:
        def run() -> None:
            for name in step.writes:
                layer = step.layers[0]
                plan.buffers[name] = torch.full((2, 4), 100.0 if layer is None else float(layer))

        return run

    steps = tuple(dataclasses.replace(step, run=tag(step)) for step in plan.steps)
    return dataclasses.replace(plan, steps=steps, launch=None)


def _plans() -> dict[str, DecodePlan]:
    engine = EngineConfig(decode_backend="latency_specialized", num_threads=1)
    native = describe(
        deployment_of(MINI, resolve(engine), runs=False), outline_model(MINI, "tiles"), 2
    )
    on_cuda = describe(cuda_deployment(MINI), outline_model(MINI, "rows", "mxfp4_rows"), 2)
    return {
        "auto": Session(make_model("k3")).plan,
        "latency_specialized": native,
        "latency_specialized on cuda": on_cuda,
    }


@pytest.mark.parametrize("name", ["auto", "latency_specialized", "latency_specialized on cuda"])
def test_tags_of_the_tapped_layers(name: str) -> None:
    """The first layer, the last one, and every one between: what comes out names its layer."""
    plan = _tagging(_plans()[name])
    layers = plan.config.num_layers
    for taps in ((0,), (layers - 1,), (0, 2, layers - 1), tuple(range(layers))):
        prefix = Taps.of(plan, _draft(taps, "prefix")).run(plan)
        assert prefix.shape == (2, len(taps), 4)
        assert prefix[:, :, 0].tolist() == [list(map(float, taps))] * 2
        # What the next layer reads is that layer's own buffer.
        readers = [100.0 if layer + 1 == layers else layer + 1.0 for layer in taps]
        mixed = Taps.of(plan, _draft(taps, "attn_res")).run(plan)
        assert mixed[:, :, 0].tolist() == [readers] * 2


def _reference(model: Model, draft: DraftConfig, tokens: list[int]) -> Tensor:
    ids = torch.tensor(tokens)
    taps = draft_reference.Taps(draft, model.config, model.parameters, ids, ROUNDED)
    state = RequestState.new(model.config, ROUNDED)
    forward(model.parameters, model.config, ids, state, ROUNDED, Options(on_layer=taps.on_layer))
    return taps.rows()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("form", ["k3", "linear"])
def test_taps_of_chunks_and_decode_steps(form: str, stream: TapStream) -> None:
    model = make_model(form)
    draft = _draft((0, 2, model.config.num_layers - 1), stream)
    session, plain = Session(model), Session(model)
    taps = Taps.of(session.plan, draft)
    tokens = tokens_of(12, 5)
    request, other = session.start(), plain.start()
    found = []
    for part in (tokens[:1], tokens[1:8], tokens[8:10], tokens[10:11], tokens[11:]):
        load_step(session.plan, StepBatch((request.take(part),)))
        found.append(taps.run(session.plan))
        logits = plain.run((other, part))
        bit_equal(session.plan.buffers["logits"], logits, "logits of a run with taps")
    assert_close(torch.cat(found), _reference(model, draft, tokens), NEAR, "taps")


@pytest.fixture(scope="module")
def mini(mini_checkpoint: Path) -> PackedModel:
    return pack_model(CheckpointReader(mini_checkpoint), "tiles")


@pytest.mark.parametrize("stream", STREAMS)
def test_the_specialised_plan_hands_out_the_same_taps(mini: PackedModel, stream: TapStream) -> None:
    """One decode step on either path behind one prompt, and its logits with and without taps."""
    draft = _draft((0, 3, MINI.num_layers - 1), stream)
    prompt = tuple(tokens_of(9, 3, 1000))
    found, logits = {}, {}
    for backend, taps in (
        ("auto", draft),
        ("latency_specialized", draft),
        ("latency_specialized", None),
    ):
        caches = Caches.allocate(MINI, "cpu", 2, 4, 64)
        engine = EngineConfig(decode_backend=backend, num_threads=1)  # type: ignore[arg-type]
        runner = StepRunner(mini, caches, resolve(engine), taps)
        slot, pages = caches.allocate_slot(), caches.allocate_pages(12)
        runner.run(StepBatch((StepRequest(prompt, 0, slot, pages, is_decode=False),)))
        step = StepBatch((StepRequest((7,), len(prompt), slot, pages, is_decode=True),))
        logits[backend, taps is not None] = runner.run(step)
        if taps is None:
            assert runner.last_taps is None
        else:
            assert runner.last_taps is not None
            found[backend] = runner.last_taps
        is_specialized = backend == "latency_specialized"
        assert runner.last_path[0] == ("specialized" if is_specialized else "standard")
    assert found["latency_specialized"].shape == (1, 3, MINI.hidden_size)
    assert_close(found["latency_specialized"], found["auto"].float(), NEAR, "taps")
    native = [logits["latency_specialized", has_taps] for has_taps in (True, False)]
    bit_equal(*native, "logits")
