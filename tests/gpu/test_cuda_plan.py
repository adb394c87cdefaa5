"""On a GPU: the plans of the smallest checkpoints, their graphs, and both backends' replies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_cases import Twins, build, decode_batch, poison, verify_batch
from native_cases import Loaded

from kdecode.cache.batch import StepBatch
from kdecode.config import EngineConfig, GpuKernels
from kdecode.decode.graph import GraphPool, capture
from kdecode.decode.runner import load_inputs
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams
from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import bit_equal

pytestmark = pytest.mark.gpu

KERNELS: tuple[GpuKernels, ...] = ("triton", "cute")


@pytest.fixture(scope="module", params=["mini_checkpoint", "mini_linear_checkpoint"])
def directory(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Loaded:
    packed = pack_model(CheckpointReader(directory), "rows", device="cuda")
    return Loaded(packed, CheckpointReader(directory).load_model())


@pytest.mark.parametrize("gpu_kernels", KERNELS)
@pytest.mark.parametrize(
    ("batch", "each"),
    [
        (decode_batch([70]), 1),
        (decode_batch([0, 63, 130]), 1),
        (decode_batch([5, 64, 0, 1, 65, 130, 2, 9]), 1),
        (verify_batch([62, 130], 4), 4),
    ],
    ids=["1 row", "3 rows", "8 rows", "2 requests of 4 rows"],
)
def test_every_step_against_the_oracle(
    loaded: Loaded, batch: StepBatch, each: int, gpu_kernels: GpuKernels
) -> None:
    twins = Twins.of(loaded)
    twins.fill(batch, seed=1)
    plan = build(loaded, twins.ours, batch.num_rows, each, gpu_kernels=gpu_kernels)
    poison(plan)
    checks = list(check_steps(plan, loaded.oracle(twins.theirs), batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    assert {"conv", "recurrent", "cache row", "route", "logits"} <= {c.buffer for c in checks}


@pytest.mark.parametrize("gpu_kernels", KERNELS)
@pytest.mark.parametrize(("rows", "each"), [(1, 1), (3, 1), (8, 4)])
def test_replays_with_other_slots_and_acceptance(
    loaded: Loaded, rows: int, each: int, gpu_kernels: GpuKernels
) -> None:
    """A graph gives the bits of launches one by one, whichever requests a step has."""
    twins, others = Twins.of(loaded), Twins.of(loaded)
    launched = build(loaded, others.ours, rows, each, gpu_kernels=gpu_kernels)
    plan = build(loaded, twins.ours, rows, each, gpu_kernels=gpu_kernels)
    recorded = capture(plan, GraphPool())
    for turn in range(3):
        contexts = [5 + 60 * place + turn for place in range(rows // each)]
        batch = decode_batch(contexts, turn) if each == 1 else verify_batch(contexts, each, turn)
        twins.fill(batch, seed=turn)
        copy_caches(twins.theirs, others.ours)
        for plan in (launched, recorded):
            load_inputs(plan, batch)
            plan.run()
        bit_equal(recorded.buffers["logits"].cpu(), launched.buffers["logits"].cpu(), "logits")
        assert torch.isfinite(recorded.buffers["logits"]).all()
        if each > 1:
            kept = {r.slot: 1 + (turn + row) % each for row, r in enumerate(batch.requests)}
            assert twins.ours.commit(kept) == others.ours.commit(kept)
        slots = [request.slot for request in batch.requests]
        for layer, states in twins.ours.recurrent.items():
            wanted = others.ours.recurrent[layer][slots]
            bit_equal(states[slots].cpu(), wanted.cpu(), f"state of layer {layer}")


def test_both_backends_reply_alike(directory: Path) -> None:
    """Greedy replies part at a near-tie at most, and every decode step is a specialised one."""
    replies = {}
    for backend in ("auto", "latency_specialized"):
        engine = EngineConfig(
            device="cuda",
            decode_backend=backend,  # type: ignore[arg-type]
            max_context_tokens=256,
            max_requests=2,
        )
        llm = LLM(directory, engine)
        prompts = [[3, 7, 11, 200, 5], [9, 8, 7]]
        params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
        replies[backend] = llm.generate(prompts, params)
        if backend == "latency_specialized":
            assert llm.stats()["coverage"] == 1.0
    for ours, theirs in zip(replies["latency_specialized"], replies["auto"], strict=True):
        for place, (token, other) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            if token != other:
                (_, first), (_, second) = theirs.logprobs[place].top[:2]
                assert first - second < 0.1, f"token {place} is {token}, not {other}"
                break
