"""Costs of a plan's steps: the bytes add up, experts are those chosen, nothing is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdecode.decode.traffic import expert_bytes, stage_state_bytes, stage_weight_bytes
from kdecode.engine.engine import LLM
from kdecode.engine.request import RequestError, SamplingParams
from kdecode.model.stages import model_stages

CONTEXT = 40


def _engine(directory: Path, backend: str) -> LLM:
    return LLM(
        directory,
        decode_backend=backend,
        num_threads=1,
        page_tokens=16,
        max_context_tokens=64,
        max_requests=4,
    )


@pytest.mark.parametrize("checkpoint", ["mini_checkpoint", "mini_linear_checkpoint"])
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_bytes_of_the_steps_are_those_of_the_stages(
    request: pytest.FixtureRequest, checkpoint: str, backend: str
) -> None:
    llm = _engine(request.getfixturevalue(checkpoint), backend)
    packed, config = llm._worker.packed, llm.model_config
    for rows in (1, 3):
        cost = llm.inspect_decode(rows, CONTEXT, 2)
        assert (cost.backend, cost.rows, cost.context_tokens) == (backend, rows, CONTEXT)
        assert len(cost.steps) == len(llm.decode_plan(rows).steps)
        stages = model_stages(config)
        one_row = sum(stage_weight_bytes(packed, layer, stage) for layer, stage in stages)
        more = sum(
            (step.distinct_experts - config.moe.top_k) * expert_bytes(packed, step.layer)
            for step in cost.steps
            if step.distinct_experts is not None and step.layer is not None
        )
        assert sum(step.weight_bytes for step in cost.steps) == pytest.approx(one_row + more)
        state = sum(stage_state_bytes(config, *stage, CONTEXT, 2) for stage in stages)
        assert sum(step.state_bytes for step in cost.steps) == rows * state > 0
        assert all(step.microseconds > 0 for step in cost.steps)
        assert cost.plan_microseconds > 0
        chosen = [step.distinct_experts for step in cost.steps if step.distinct_experts]
        assert len(chosen) == config.mlp_kinds.count("moe")
        if rows == 1:
            assert set(chosen) == {config.moe.top_k}
        else:
            assert all(config.moe.top_k < count <= rows * config.moe.top_k for count in chosen)


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_a_verify_step_reads_its_slots_and_cache_once(mini_checkpoint: Path, backend: str) -> None:
    llm = _engine(mini_checkpoint, backend)
    config = llm.model_config
    cost = llm.inspect_decode(2, CONTEXT, 2, drafts=3)
    assert (cost.backend, cost.rows, cost.rows_per_request) == (backend, 8, 4)
    kda, mla = config.layer_kinds.count("kda"), config.layer_kinds.count("mla")
    slot = config.kda.width * config.kda.head_dim * 4 + 3 * 3 * config.kda.width * 2
    rows = (CONTEXT + 3 + 4) * config.mla.cache_width * 2
    assert sum(step.state_bytes for step in cost.steps) == 2 * (kda * slot + mla * rows)
    effects = 4 * config.kda.width * 18
    assert cost.commit_bytes == 2 * kda * (2 * slot + effects)
    assert cost.commit_microseconds is not None
    assert cost.commit_microseconds > 0
    assert llm.inspect_decode(1, CONTEXT, 1).commit_microseconds is None
    assert (llm.stats()["slots_used"], llm.stats()["pages_used"]) == (0, 0)
    with pytest.raises(
        RequestError, match=r"Requests: 1, tokens of each: 65; .* hold 4 of at most 64"
    ):
        llm.inspect_decode(1, 62, 1, drafts=3)


def test_a_shared_expert_is_counted_where_it_is_read(mini_checkpoint: Path) -> None:
    llm = _engine(mini_checkpoint, "latency_specialized")
    packed = llm._worker.packed
    layer = llm.model_config.mlp_kinds.index("moe")
    moe = packed.layers[layer].mlp
    steps = {step.op: step for step in llm.decode_plan(1).steps if step.layers == (layer,)}
    front = moe.router.num_bytes + moe.latent_down.num_bytes + moe.shared.gate_up.num_bytes
    assert steps["moe_front"].weight_bytes == front
    tail = moe.shared.down.num_bytes + moe.latent_up.num_bytes
    tail += llm.model_config.moe.top_k * expert_bytes(packed, layer)
    assert steps["moe_tail"].weight_bytes == tail


def test_a_probe_gives_its_slots_and_pages_back(mini_checkpoint: Path) -> None:
    llm = _engine(mini_checkpoint, "latency_specialized")
    short = SamplingParams(max_tokens=6, ignore_eos=True)
    before = llm.generate([[5, 6, 7]], short)[0].token_ids
    llm.inspect_decode(4, 64, 1)
    stats = llm.stats()
    assert (stats["slots_used"], stats["pages_used"]) == (0, 0)
    assert llm.generate([[5, 6, 7]], short)[0].token_ids == before
    with pytest.raises(RequestError, match=r"Requests: 5, .* caches hold 4"):
        llm.inspect_decode(5, 64, 1)
    stream = llm.stream([5, 6, 7], short)
    next(stream)
    with pytest.raises(RequestError, match="idle engine"):
        llm.inspect_decode(1, 8, 1)
    stream.close()
