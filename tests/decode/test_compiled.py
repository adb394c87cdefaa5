"""Decode steps of the standard forward as a graph, and compiled, against the rounded reference."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from auto_cases import PAGE_TOKENS, Model, Oracle, Request, Session, make_model, tokens_of
from test_auto import LOGITS, ROWS, STATE, assert_state, cached_rows

from kdecode.cache.batch import StepBatch
from kdecode.config import CompileForm, EngineConfig
from kdecode.decode.auto import build_auto_plan
from kdecode.decode.compiled import CompiledStep, CompileError, compile_step, record, refuse
from kdecode.kernels.common.opaque import OpaqueOperators
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.testing.compare import assert_close

LENGTHS = (21, 5, 40)
DECODED = 4


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {form: make_model(form) for form in ("k3", "linear")}


def _engine(session: Session) -> EngineConfig:
    scale = session.scales and next(iter(session.scales.values()))
    is_fp8 = session.cache_dtype == "fp8"
    return EngineConfig(
        cache_dtype=session.cache_dtype,
        cache_scale=scale if is_fp8 else None,
        page_tokens=PAGE_TOKENS,
    )


def _recorded(session: Session, rows: int) -> CompiledStep:
    """The graph of a step, which torch runs operator by operator."""
    plan = build_auto_plan(
        session.model.packed, session.caches, _engine(session), operators=OpaqueOperators()
    )
    made_up = [session.start(max_tokens=1) for _ in range(rows)]
    with torch.no_grad():
        graph = record(plan, StepBatch(tuple(request.take([0]) for request in made_up)))
    for request in made_up:
        session.caches.free_slot(request.slot)
        session.caches.free_pages(request.pages)
    return CompiledStep(plan, graph, 0.0)


def _follow_reference(session: Session, step: CompiledStep, rows: int, slack: float = 1.0) -> None:
    """Requests of uneven lengths decode on slots and pages that were not those of the recording.

    slack: on the bounds, for a compiler that leaves out roundings between operators.
    """
    requests, oracles, streams = list[Request](), list[Oracle](), list[list[int]]()
    for number, length in enumerate(LENGTHS[:rows]):
        requests.append(session.start(max_tokens=length + DECODED, skip_pages=number))
        oracles.append(Oracle(session.model, session.cache_dtype))
        streams.append(tokens_of(length + DECODED, seed=number))
        session.run((requests[-1], streams[-1][:length]))
    golds = [oracle.run(stream) for oracle, stream in zip(oracles, streams, strict=True)]
    for place in range(DECODED):
        # Another order in every step: rows are nobody's for good.
        order = [(place + row) % rows for row in range(rows)]
        shares = [requests[row].take([streams[row][LENGTHS[row] + place]]) for row in order]
        logits = step.run(StepBatch(tuple(shares)))
        wanted = torch.stack([golds[row][LENGTHS[row] + place] for row in order])
        assert_close(logits, wanted, _times(LOGITS, slack), f"logits of step {place}")
    for request, oracle in zip(requests, oracles, strict=True):
        if slack == 1.0:
            assert_state(session, request, oracle)
            continue
        for layer, gold in oracle.state.recurrent.items():
            own = session.caches.recurrent[layer][request.slot]
            assert_close(own, gold, _times(STATE, slack), f"recurrent {layer}")
        for layer, gold in oracle.state.windows.items():
            own = session.caches.conv[layer][request.slot]
            assert_close(own, gold, _times(ROWS, slack), f"window {layer}")
        for layer, stored in oracle.state.rows.items():
            gold = reference.load_rows(stored, reference.ROUNDED, 1.0)
            own = cached_rows(session, request, layer)
            assert_close(own, gold, _times(ROWS, slack), f"rows {layer}")


def _times(tolerance: Tolerance, slack: float) -> Tolerance:
    return Tolerance(tolerance.rtol, slack * tolerance.atol, slack * tolerance.rms_ratio)


@pytest.mark.parametrize("form", ["k3", "linear"])
@pytest.mark.parametrize(("rows", "cache_dtype"), [(1, "bf16"), (3, "bf16"), (1, "fp8")])
def test_the_graph_of_a_step_is_the_forward(
    models: dict[str, Model], form: str, rows: int, cache_dtype: str
) -> None:
    session = Session(models[form], cache_dtype, num_slots=7)
    step = _recorded(session, rows)
    assert isinstance(step.forward, torch.fx.GraphModule)
    _follow_reference(session, step, rows)


def test_whoever_records_leaves_no_operator_behind(models: dict[str, Model]) -> None:
    operators = OpaqueOperators()
    operator = operators.define(1, lambda x: x + 1, torch.empty_like)
    name = operator.name()
    assert operator(torch.zeros(2)).tolist() == [1.0, 1.0]
    del operator, operators
    gc.collect()
    assert not torch._C._dispatch_has_kernel(name)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "form"), [("k3", "default"), ("linear", "freezing")])
def test_what_inductor_makes_of_it_is_the_forward(
    models: dict[str, Model], model: str, form: CompileForm
) -> None:
    session = Session(models[model], num_slots=7)
    packed, caches = session.model.packed, session.caches
    step = compile_step(packed, caches, _engine(session), 3, form)
    assert step.seconds > 0
    _follow_reference(session, step, 3, slack=3.0)


def test_what_cannot_be_compiled_says_why(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = models["k3"].packed
    assert refuse(packed, EngineConfig()) == []
    reasons = refuse(
        make_model("k3", "tiles").packed,
        EngineConfig(decode_backend="latency_specialized", device="cuda"),
    )
    assert [reason.split(";")[0] for reason in reasons] == [
        "It is the standard forward",
        "Steps are compiled for a CPU",
        "torch multiplies rows",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    session = Session(models["k3"])
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler; .* is not on the PATH"):
        compile_step(packed, session.caches, EngineConfig(), 1, "default")


def test_an_error_of_the_compiler_is_a_sentence_and_the_places_are_free_again(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: object, **options: object) -> object:
        raise NotImplementedError("no such operator\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    session = Session(models["k3"])
    with pytest.raises(CompileError, match=r"NotImplementedError: no such operator$"):
        compile_step(session.model.packed, session.caches, _engine(session), 2, "default")
    assert session.caches.slot_pool.num_used == session.caches.page_pool.num_used == 0
