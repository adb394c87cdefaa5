"""What a request may ask for, inside of accepted runs: the same reply as without drafts.

On the specialised path a verify step of one request has the sums of single steps, bit by bit, so
replies, logprobs and logits are compared exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from proposers import Scripted, SelfDraft, inner, use
from speculation_cases import BACKENDS, Plain, build, draft_directory, greedy, speculative

from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.config import ConfigError, ModelConfig
from kdecode.config_speculative import SpeculativeConfig
from kdecode.engine import speculation
from kdecode.engine.engine import LLM
from kdecode.engine.judge import Judge
from kdecode.engine.request import Output, RequestError, SamplingParams, StructuredOutput
from kdecode.speculative.adaptive import StepCosts
from kdecode.speculative.types import Proposal, RoundRequest
from kdecode.testing.compare import bit_equal

PROMPT = [5, 9, 3, 7, 1] * 3


@pytest.fixture(scope="module")
def plain(mini_checkpoint: Path) -> LLM:
    return build(mini_checkpoint, "latency_specialized", None)


@pytest.fixture(scope="module")
def drafting(mini_checkpoint: Path) -> LLM:
    return build(mini_checkpoint, "latency_specialized", speculative(mini_checkpoint))


def _with_drafts(llm: LLM, reply: Output, params: SamplingParams) -> Output:
    """The reply with drafts of which every number is right in turn, and rounds of none."""
    proposer = inner(llm)
    number = llm._num_requests
    script = Scripted(
        proposer, replies={number: reply.token_ids}, prompts={number: len(reply.prompt_ids)}
    )
    use(llm, script)
    try:
        (output,) = llm.generate([list(reply.prompt_ids)], params)
    finally:
        use(llm, proposer)
    assert output.error is None, output.error
    return output


def _reply(llm: LLM, **settings: object) -> Output:
    return llm.generate([PROMPT], SamplingParams(**{"max_tokens": 24, **settings}))[0]  # type: ignore[arg-type]


def _free(llm: LLM) -> Output:
    """What the model says when nothing is asked for."""
    return _reply(llm, ignore_eos=True)


# What is asked for, given the model's free reply.
CONTROLS: dict[str, Callable[[Output, LLM], dict[str, object]]] = {
    "max_tokens 1": lambda free, llm: {"max_tokens": 1},
    "max_tokens 2": lambda free, llm: {"max_tokens": 2},
    "max_tokens 7": lambda free, llm: {"max_tokens": 7},
    "a token that stops": lambda free, llm: {"stop_token_ids": (free.token_ids[9],)},
    "a text that stops": lambda free, llm: {"stop": (free.text[20:24],)},
    "no stop before": lambda free, llm: {
        "stop_token_ids": (free.token_ids[5], free.token_ids[15]),
        "min_tokens": 12,
    },
    "no text stops before": lambda free, llm: {
        "stop": (free.text[6:10], free.text[-8:-4]),
        "min_tokens": 10,
    },
    "bias": lambda free, llm: {"logit_bias": ((free.token_ids[4], -100.0), (77, 3.0))},
    "allowed": lambda free, llm: {"allowed_token_ids": tuple(range(0, 1000, 3))},
    "bad words": lambda free, llm: {"bad_words": (llm.tokenizer.decode([free.token_ids[6]]),)},
    "presence": lambda free, llm: {"presence_penalty": 2.0},
    "frequency": lambda free, llm: {"frequency_penalty": 1.5},
    "repetition": lambda free, llm: {"repetition_penalty": 1.8},
    "language": lambda free, llm: {
        "structured": StructuredOutput("regex", "(yes|no|maybe)( (yes|no|maybe)){3,6}")
    },
    "schema": lambda free, llm: {
        "structured": StructuredOutput("json_schema", '{"enum": ["one", ["two", 2], null]}')
    },
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_act_on_every_token_of_a_run(plain: LLM, drafting: LLM, control: str) -> None:
    """Once with drafts of the reply itself, and once with those of the reply that is not wanted."""
    free = _free(plain)
    settings = {"max_tokens": 24, "ignore_eos": True, **CONTROLS[control](free, plain)}
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    (expected,) = plain.generate([PROMPT], params)
    if control not in ("max_tokens 1", "max_tokens 2", "max_tokens 7"):
        assert expected.token_ids != free.token_ids, "the control does nothing here"
    for script in (expected, free):
        found = _with_drafts(drafting, script, params)
        assert found.token_ids == expected.token_ids
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        rounds = found.rounds
        if script is expected and len(expected.token_ids) > 8:
            assert rounds.accepted > 0
        # C4: every token but the first is of a round or of a plain step.
        in_steps = sum(found.decode_steps.values())
        assert rounds.emitted + in_steps - rounds.rounds == len(found.token_ids) - 1


def test_logprobs_are_those_of_plain_decoding(plain: LLM, drafting: LLM) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5, prompt_logprobs=2)
    (expected,) = plain.generate([PROMPT], params)
    found = _with_drafts(drafting, expected, params)
    assert len(found.logprobs) == 24
    assert found.logprobs == expected.logprobs
    assert found.prompt_logprobs == expected.prompt_logprobs


def test_a_reply_that_is_followed_has_its_own_tokens_for_drafts(plain: LLM, drafting: LLM) -> None:
    """Its logits come from verify steps, and say nothing about the draft's acceptance."""
    # One behind the prompt, and five steps of four.
    reply = _free(plain).token_ids[:21]
    before = drafting.stats()["speculation"]
    expected = plain.teacher_forced(PROMPT, reply)
    bit_equal(drafting.teacher_forced(PROMPT, reply), expected, "logits")
    after = drafting.stats()["speculation"]
    assert after["rounds"] == before["rounds"]
    assert after["steps"] == before["steps"] + 5


def test_greedy_and_sampled_rounds_are_counted_apart(drafting: LLM) -> None:
    before = drafting.stats()["speculation"]
    drafting.generate([PROMPT], SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0))
    after = drafting.stats()["speculation"]
    assert after["sampled"]["rounds"] > before["sampled"]["rounds"]
    assert after["greedy"] == before["greedy"]
    assert after["rounds"] == after["sampled"]["rounds"] + after["greedy"]["rounds"]


def test_a_seed_is_the_same_reply_whatever_runs_beside_it(drafting: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5)
    (first,) = drafting.generate([PROMPT], params)
    (again,) = drafting.generate([PROMPT], params)
    assert first.token_ids == again.token_ids
    other = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=6)
    assert drafting.generate([PROMPT], other)[0].token_ids != first.token_ids


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_up_to_the_longest_context(mini_checkpoint: Path, backend: str) -> None:
    """The last rounds have fewer drafts, in the engine and in both caches."""
    config = speculative(
        mini_checkpoint, rejection_sample_method="synthetic", synthetic_acceptance_length=4
    )
    llm = build(mini_checkpoint, backend, config, max_context_tokens=48)
    (output,) = llm.generate([[3] * 15], greedy(33))
    assert (output.error, len(output.token_ids)) == (None, 33)
    assert output.rounds.is_synthetic
    assert output.rounds.acceptance_length == pytest.approx(4.0, abs=0.3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sixty_requests_meet_no_poison(mini_checkpoint: Path, backend: str) -> None:
    """Prompts and chunks of one token among them, uneven acceptance, slots that change hands."""
    config = speculative(
        mini_checkpoint,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(0.8, 0.5, 0.2),
    )
    llm = build(mini_checkpoint, backend, config, max_step_tokens=17, max_context_tokens=64)
    lengths = [(1, 1, 2, 3, 15, 16, 17, 18, 35)[(7 * n) % 9] for n in range(60)]
    prompts = [[(31 * n + i) % 1000 for i in range(length)] for n, length in enumerate(lengths)]
    outputs = llm.generate(prompts, greedy(4))
    assert [output.error for output in outputs if output.error is not None] == []
    assert {len(output.token_ids) for output in outputs} == {4}
    stats = llm.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)
    assert 0 < stats["speculation"]["acceptance_rate"] < 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption_in_the_middle(mini_checkpoint: Path, backend: str) -> None:
    llm = build(mini_checkpoint, backend, None)
    prompts = [[n + 1] * 14 for n in range(3)]
    plain = Plain(llm, llm.generate(prompts, greedy(24)))
    model = ModelConfig.from_checkpoint(mini_checkpoint)
    config = speculative(mini_checkpoint)
    tight = build(mini_checkpoint, backend, config)
    page = page_bytes(model, 16, "bf16", tight._worker.draft)
    budget = 3 * slot_bytes(model) + 6 * page
    tight = build(mini_checkpoint, backend, config, cache_budget_bytes=budget)
    lengths = dict.fromkeys(range(3), 14)
    use(tight, Scripted(inner(tight), replies=plain.replies, prompts=lengths))
    outputs = tight.generate(prompts, greedy(24))
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [(output.error, len(output.token_ids)) for output in outputs] == [(None, 24)] * 3
    assert plain.near_ties(outputs) <= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_abort_between_verify_and_commit_harms_nobody_else(
    mini_checkpoint: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's requests end, what they held is free, and those that wait are served right."""
    llm = build(mini_checkpoint, backend, None)
    prompts = [[n + 1, n + 2] for n in range(6)]
    plain = Plain(llm, llm.generate(prompts, greedy(6)))
    broken = build(mini_checkpoint, backend, speculative(mini_checkpoint))
    lengths = dict.fromkeys(range(6), 2)
    use(broken, Scripted(inner(broken), replies=plain.replies, prompts=lengths))
    calls = []

    class BreaksOnce(Judge):
        def __call__(self, index: int, proposal: Proposal, logits: torch.Tensor) -> object:  # type: ignore[override]
            calls.append(index)
            if len(calls) == 5:
                raise RuntimeError("between verify and commit")
            return super().__call__(index, proposal, logits)

    monkeypatch.setattr(speculation, "Judge", BreaksOnce)
    outputs = broken.generate(prompts, greedy(6))
    ended = [output for output in outputs if output.finish_reason == "error"]
    whole = [output for output in outputs if output.finish_reason == "length"]
    assert (len(ended), len(whole)) == (3, 3)
    assert plain.near_ties(whole) <= 2
    stats = broken.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)


def test_a_draft_outside_of_the_vocabulary_reaches_no_memory(drafting: LLM) -> None:
    proposer = inner(drafting)

    class Outside(Scripted):
        def _propose(self, request: RoundRequest) -> Proposal:
            return Proposal(request.anchor_position, (10**6,))

    use(drafting, Outside(proposer))
    try:
        (output,) = drafting.generate([PROMPT], greedy(5))
    finally:
        use(drafting, proposer)
    assert output.error is not None
    assert "1000000" in output.error
    assert len(output.token_ids) == 1
    assert drafting.generate([PROMPT], greedy(5))[0].error is None


def test_stated_rates_and_a_language_exclude_each_other(mini_checkpoint: Path) -> None:
    config = speculative(
        mini_checkpoint, rejection_sample_method="synthetic", synthetic_acceptance_length=2
    )
    llm = build(mini_checkpoint, "auto", config)
    language = StructuredOutput("regex", "a+")
    with pytest.raises(RequestError, match="whatever they are"):
        llm.generate([PROMPT], SamplingParams(structured=language))


def test_drafts_that_do_not_fit_are_refused_before_packing(mini_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="trained for at most 7"):
        build(mini_checkpoint, "auto", speculative(mini_checkpoint, 8))
    with pytest.raises(ConfigError, match=r"needs 24 \(requests: 3, drafts of each: 7\)"):
        build(mini_checkpoint, "auto", speculative(mini_checkpoint, 7), max_step_tokens=23)


@pytest.mark.parametrize("tokens", [16, 1024, 8192])
def test_the_target_as_its_own_draft_accepts_everything(mini_checkpoint: Path, tokens: int) -> None:
    config = speculative(mini_checkpoint)
    llm = build(
        mini_checkpoint,
        "latency_specialized",
        config,
        max_context_tokens=8192 + 64,
        max_requests=1,
        max_step_tokens=512,
        page_tokens=64,
    )
    use(llm, SelfDraft(inner(llm), llm._worker.runner, llm._worker.caches))
    (output,) = llm.generate([[(7 * n) % 1000 for n in range(tokens)]], greedy(20))
    assert output.error is None
    assert (output.rounds.acceptance_rate, output.rounds.acceptance_length) == (1.0, 4.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_verification_adapts_to_what_steps_cost(mini_checkpoint: Path, backend: str) -> None:
    """Measured costs first; then free rows, which all drafts get, and rows too dear for any."""
    prompts = [PROMPT, [4, 4, 4]]
    llm = build(mini_checkpoint, backend, None)
    plain = Plain(llm, llm.generate(prompts, greedy(16)))
    config = speculative(mini_checkpoint, enable_adaptive_verification=True)
    llm = build(mini_checkpoint, backend, config)
    stats = llm.stats()
    assert (stats["pages_used"], stats["slots_used"], stats["decode_steps"]) == (0, 0, [])
    engine = llm._worker.speculation
    assert engine is not None
    assert engine.costs is not None
    # One request and three, with up to three drafts.
    assert engine.costs.rows == (1, 2, 3, 4, 6, 9, 12)
    assert 0 < engine.costs.times[0] <= engine.costs.times[-1]
    assert engine.costs.draft > 0
    free = StepCosts.of({1: 1.0, 12: 1.0}, draft=1.0)
    dear = StepCosts.of({1: 1.0, 2: 100.0}, draft=0.0)
    for costs, drafts in ((engine.costs, None), (free, 3), (dear, 0)):
        engine.costs = costs
        before = llm.stats()["speculation"]
        outputs = llm.generate(prompts, greedy(16))
        assert [output.error for output in outputs] == [None, None]
        assert plain.near_ties(outputs) <= 2
        after = llm.stats()["speculation"]
        rounds = after["rounds"] - before["rounds"]
        drafted = after["drafted_tokens"] - before["drafted_tokens"]
        if drafts is not None:
            assert drafted == drafts * rounds
            assert (rounds > 0) == (drafts > 0)


def test_a_draft_without_confidence_cannot_adapt(mini_checkpoint: Path, tmp_path: Path) -> None:
    source = Path(draft_directory(mini_checkpoint))
    document = json.loads((source / "config.json").read_text())
    document["enable_confidence_head"] = False
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = SpeculativeConfig(str(tmp_path), 3, enable_adaptive_verification=True)
    with pytest.raises(ConfigError, match="no confidence head"):
        build(mini_checkpoint, "auto", config)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_in_a_batch_of_all_kinds(
    mini_checkpoint: Path, backend: str, method: str
) -> None:
    """Greedy and sampled requests in one step, with filters: replies that their seeds decide."""
    config = speculative(
        mini_checkpoint, draft_sample_method="probabilistic", rejection_sample_method=method
    )
    llm = build(mini_checkpoint, backend, config)
    kinds = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, top_k=40, seed=1),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.5, top_p=0.95, seed=2),
    ]
    runs = []
    for _ in range(2):
        numbers = [llm.add_request(PROMPT, params) for params in kinds]
        while llm.loop.scheduler.has_work:
            llm.loop.step()
        runs.append([llm.loop.collect(number) for number in numbers])
    assert [output.error for output in runs[0]] == [None] * 3
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]]
    found = llm.stats()["speculation"]
    assert found["sampled"]["rounds"] > found["greedy"]["rounds"] > 0
