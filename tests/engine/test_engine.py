"""The public engine on a small checkpoint: both backends, batching, streams, chat, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kdecode
from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.decode import latency_specialized, runner
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.engine.engine import LLM, Token
from kdecode.engine.request import RequestError, SamplingParams
from kdecode.kernels.common import _native
from kdecode.kernels.linear import native as linear_native

PROMPTS = ["the cat sat", "def f(x):", "a"]
BACKENDS = ("auto", "latency_specialized")


def _build(checkpoint: Path, backend: str, **settings: object) -> LLM:
    defaults = {"num_threads": 1, "page_tokens": 16, "max_context_tokens": 256, "max_requests": 3}
    return LLM(checkpoint, decode_backend=backend, **{**defaults, **settings})


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request: pytest.FixtureRequest, mini_checkpoint: Path) -> LLM:
    return _build(mini_checkpoint, request.param)


@pytest.fixture(autouse=True)
def _nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        stats = request.getfixturevalue("llm").stats()
        held = [stats[name] for name in ("waiting", "running", "pages_used", "slots_used")]
        assert held == [0, 0, 0, 0]


def _greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_a_reply_has_tokens_text_times_and_counted_steps(llm: LLM) -> None:
    (output,) = llm.generate(["the cat sat"], _greedy(7))
    assert len(output.token_ids) == 7
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special=True)
    assert output.finish_reason == "length"
    times = [output.timing.start_ns, *output.timing.token_ns]
    assert times == sorted(times)
    assert len(output.timing.token_ns) == 7
    assert output.timing.prefill_end_ns == output.timing.token_ns[0]
    assert 0 < output.timing.prefill_ns < output.timing.token_ns[0] - output.timing.start_ns
    is_auto = llm.engine_config.decode_backend == "auto"
    expected = ("standard", "decode_backend is auto") if is_auto else ("specialized", "")
    assert output.decode_steps == {expected: 6}


def test_replies_do_not_depend_on_the_batch_when_the_rows_do_not(llm: LLM) -> None:
    first = llm.generate(["the cat sat"], _greedy())[0]
    again = llm.generate(["the cat sat"], _greedy())[0]
    assert first.token_ids == again.token_ids


def test_a_batch_keeps_the_order_of_its_prompts(llm: LLM) -> None:
    seen: list[Token] = []
    outputs = llm.generate(PROMPTS, _greedy(4), on_token=seen.append)
    assert [output.prompt_ids for output in outputs] == [
        tuple(llm.tokenizer.encode_text(prompt)) for prompt in PROMPTS
    ]
    for index, output in enumerate(outputs):
        mine = [token for token in seen if token.prompt == index]
        assert tuple(token.token_id for token in mine) == output.token_ids
        assert "".join(token.text for token in mine) == output.text
        assert [token.finish_reason for token in mine] == [None, None, None, "length"]


def test_more_prompts_than_slots_are_all_served(llm: LLM) -> None:
    outputs = llm.generate([[i + 1, i + 2] for i in range(7)], _greedy(3))
    assert [len(output.token_ids) for output in outputs] == [3] * 7


def test_teacher_forced_logits_choose_what_greedy_chose(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7, 8]], _greedy(6))
    logits = llm.teacher_forced([5, 6, 7, 8], output.token_ids)
    assert logits.shape == (6, llm.model_config.vocab_size)
    assert logits.argmax(-1).tolist() == list(output.token_ids)
    # Along another reply the positions before the change keep their logits.
    other = [*output.token_ids[:3], (output.token_ids[3] + 1) % 100, 1, 2]
    changed = llm.teacher_forced([5, 6, 7, 8], other)
    assert torch.equal(changed[:4], logits[:4])
    assert not torch.equal(changed[4:], logits[4:])


def test_a_stream_gives_the_same_tokens_and_may_be_closed(llm: LLM) -> None:
    (output,) = llm.generate(["the cat sat"], _greedy())
    assert [token.token_id for token in llm.stream("the cat sat", _greedy())] == list(
        output.token_ids
    )
    stream = llm.stream("the cat sat", _greedy())
    next(stream)
    stream.close()


def test_two_streams_interleave(llm: LLM) -> None:
    a, b = llm.stream([3, 4, 5], _greedy(4)), llm.stream([9, 8], _greedy(4))
    pairs = list(zip(a, b, strict=True))
    assert len(pairs) == 4
    assert all(token.token_id is not None for pair in pairs for token in pair)


def test_random_replies_repeat_by_seed_and_differ_between_seeds(llm: LLM) -> None:
    def reply(seed: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=8, temperature=1.5, seed=seed, ignore_eos=True)
        return llm.generate([[1, 2, 3]], params)[0].token_ids

    assert reply(1) == reply(1)
    assert reply(1) != reply(2)


def test_end_tokens_and_stop_strings_end_a_reply(llm: LLM) -> None:
    (full,) = llm.generate([[5, 6, 7, 8]], _greedy(6))
    third = full.token_ids[2]
    first = full.token_ids.index(third)
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(third,))
    (ended,) = llm.generate([[5, 6, 7, 8]], params)
    assert ended.token_ids == full.token_ids[: first + 1]
    assert ended.finish_reason == "stop"
    assert ended.text == llm.tokenizer.decode(full.token_ids[:first], skip_special=True)
    stop = full.text[2:4]
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop=(stop,))
    (stopped,) = llm.generate([[5, 6, 7, 8]], params)
    assert stopped.finish_reason == "stop"
    assert stopped.text == full.text[: full.text.find(stop)]


def test_an_end_token_is_not_chosen_before_min_tokens(llm: LLM) -> None:
    (full,) = llm.generate([[5, 6, 7, 8]], _greedy(1))
    end = full.token_ids[0]
    params = SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=(end,))
    (output,) = llm.generate([[5, 6, 7, 8]], params)
    assert end not in output.token_ids[:3]
    assert len(output.token_ids) >= 3


def test_chat_splits_the_reply(llm: LLM) -> None:
    shown: list[tuple[str, str]] = []
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=5)
    reply = llm.chat(messages, params, on_text=lambda *texts: shown.append(texts))
    assert 1 <= len(reply.output.token_ids) <= 5
    assert reply.reasoning + reply.response
    # It came in pieces, as the tokens did.
    assert len(shown) > 1
    reasoning, response = ("".join(texts) for texts in zip(*shown, strict=True))
    assert (reasoning, response) == (reply.reasoning, reply.response)


def test_auto_multiplies_with_the_instruction_set_that_it_reports(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, str]] = []

    def spy(name: str) -> Callable[..., None]:
        def call(isa: str, *args: object) -> None:
            used.append((name, isa))
            getattr(_native, name)(isa, *args)

        return call

    spies = SimpleNamespace(linear=spy("linear"), unpack=spy("unpack"))
    monkeypatch.setattr(linear_native, "_native", spies)
    for backend in BACKENDS:
        llm = _build(mini_checkpoint, backend, isa="portable", max_step_tokens=256)
        llm.generate([[5, 6] * 120], _greedy(2))
        assert llm.resolved_config()["isa"] == "portable"
        assert "linear" in {name for name, _ in used}
    assert {isa for _, isa in used} == {"portable"}


def test_the_instruction_set_is_chosen_once_for_everything(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing, plans and products of an engine that was told none."""
    asked: list[str] = []

    def detect() -> str:
        asked.append("portable")
        return "portable"

    monkeypatch.setattr(runner.native, "detect_isa", detect)
    for backend in BACKENDS:
        llm = _build(mini_checkpoint, backend)
        llm.generate([[5, 6] * 20], _greedy(2))
        assert llm.resolved_config()["isa"] == "portable"
        assert {step.impl for step in llm.decode_plan(1).steps} <= {"torch", "cpu/portable"}
    assert asked == ["portable"] * len(BACKENDS)


def test_what_this_processor_cannot_do_is_refused(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="num_threads is 9999; this process may use"):
        _build(mini_checkpoint, "auto", num_threads=9999)
    monkeypatch.setattr(runner.native, "supported_isas", lambda: ["avx2", "portable"])
    for backend in BACKENDS:
        with pytest.raises(ConfigError, match="isa is 'avx512'; this processor and build have"):
            _build(mini_checkpoint, backend, isa="avx512")


def test_caches_that_cannot_be_allocated_are_an_error(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object, **more: object) -> None:
        raise RuntimeError("can't allocate memory\nand where")

    monkeypatch.setattr("kdecode.engine.rank.Caches.allocate", no_memory)
    with pytest.raises(ConfigError, match=r"allocated \(KDA slots: 3, .*: can't .* memory$"):
        _build(mini_checkpoint, "auto")


def test_bad_requests_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompts, message in (
        ([[1], []], "no tokens"),
        ([[1], [10**6]], "Token 0 of the prompt is 1000000"),
        ([[1] * 253], "makes 257; max_context_tokens is 256"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, _greedy(4))
    with pytest.raises(RequestError, match="Token 1 of the reply"):
        llm.teacher_forced([1], [2, -1])
    with pytest.raises(TypeError, match="list of prompts"):
        llm.generate("text")


def test_a_callback_that_raises_frees_its_requests(llm: LLM) -> None:
    def fail(token: Token) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, _greedy(), on_token=fail)


def test_a_broken_step_is_reported_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llm._worker.runner
    run = runner.run
    calls = []

    def breaks_once(batch: object) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("no such memory")
        return run(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run", breaks_once)
    (broken,) = llm.generate([[1, 2, 3]], _greedy(6))
    assert (broken.finish_reason, broken.error) == ("error", "RuntimeError: no such memory")
    assert len(broken.token_ids) == 2
    (whole,) = llm.generate([[1, 2, 3]], _greedy(6))
    assert whole.token_ids[:2] == broken.token_ids
    assert whole.error is None


def test_both_backends_resolve_to_the_same_but_for_the_backend(
    llm: LLM, mini_checkpoint: Path
) -> None:
    config = llm.resolved_config()
    assert config["decode_backend"] == llm.engine_config.decode_backend
    other = _build(mini_checkpoint, "auto").resolved_config()
    assert {**config, "decode_backend": "auto"} == other
    assert config["threads"] == 1
    assert config["cache"]["slots"] == 3
    assert llm.decode_plan(1).backend == llm.engine_config.decode_backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_requests_lose_nothing(mini_checkpoint: Path, backend: str) -> None:
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    # Slots for all three, but pages for the prompts and a little more.
    budget = 3 * slot_bytes(config) + 8 * page_bytes(config, 16, "bf16")
    llm = _build(mini_checkpoint, backend, max_context_tokens=64, cache_budget_bytes=budget)
    assert llm.resolved_config()["cache"]["pages"] == 8
    outputs = llm.generate([[i + 1] * 20 for i in range(3)], _greedy(40))
    assert [len(output.token_ids) for output in outputs] == [40] * 3
    assert outputs[0].num_preemptions == 0
    assert sum(output.num_preemptions for output in outputs) > 0
    stats = llm.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)


def test_engine_settings_are_checked(mini_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_step_tokens is 2; .* needs 3"):
        _build(mini_checkpoint, "auto", max_step_tokens=2)
    with pytest.raises(ConfigError, match="max_context_tokens is 2,000,000"):
        _build(mini_checkpoint, "auto", max_context_tokens=2_000_000)
    with pytest.raises(ConfigError, match="decode_backend is 'fast'"):
        _build(mini_checkpoint, "fast")
    with pytest.raises(TypeError, match="not both"):
        LLM(mini_checkpoint, EngineConfig(), seed=1)


def test_a_device_that_cannot_serve_is_refused_before_packing(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdecode.engine import worker

    monkeypatch.setattr(worker, "pack_model", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("auto", "latency_specialized"):
        missing = r"device is 'cuda', but torch .* finds no CUDA device"
        with pytest.raises(ConfigError, match=missing):
            LLM(mini_checkpoint, device="cuda", decode_backend=backend)
    monkeypatch.setattr(latency_specialized, "refuse", lambda deployment: ["A reason of its own."])
    with pytest.raises(BackendRefusedError, match="A reason of its own") as raised:
        LLM(mini_checkpoint, device="cuda", decode_backend="latency_specialized")
    # The device is missing for auto, too.
    assert "Nor can any backend:\n  - device is 'cuda', but torch" in str(raised.value)
    assert "Set decode_backend to auto" not in str(raised.value)


def test_the_package_names_its_public_api() -> None:
    assert kdecode.LLM is LLM
    assert all(hasattr(kdecode, name) for name in kdecode.__all__)
    with pytest.raises(AttributeError, match="has no 'Engine'"):
        _ = kdecode.Engine


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_what_the_caches_rule_out_is_found_before_anything_is_packed(
    mini_checkpoint: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdecode.engine.worker.pack_model", None)
    # Where a slot is missing for the third request, two are what a step has to hold.
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    page, slot = page_bytes(config, 16, "bf16"), slot_bytes(config)
    settings = {"max_context_tokens": 64, "max_step_tokens": 1}
    two = 2 * slot + 8 * page
    for budget, message in (
        (slot, f"cache budget is {slot:,} bytes"),
        (two, r"max_step_tokens is 1; .* needs 2 \(requests: 2, drafts of each: 0\)"),
        (None, r"max_step_tokens is 1; .* needs 3 \(requests: 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            _build(mini_checkpoint, backend, cache_budget_bytes=budget, **settings)


def test_a_closed_engine_takes_no_request_and_says_so(mini_checkpoint: Path) -> None:
    with _build(mini_checkpoint, "auto") as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    with pytest.raises(RuntimeError, match="This engine was closed"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(("size", "is_said"), [("2", True), ("1", False), ("", False)])
def test_one_of_several_whole_engines_says_so(
    size: str,
    is_said: bool,
    mini_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", size)
    LLM(mini_checkpoint, num_threads=1, max_requests=1).close()
    assert ("torchrun has started 2 processes" in caplog.text) == is_said
