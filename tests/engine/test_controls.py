"""Penalties, bias, bans and languages: what they do to logits, to replies and to neighbours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kdecode.cache.budget import page_bytes, slot_bytes
from kdecode.engine.controls import ControlError, Controls, controls_of
from kdecode.engine.engine import LLM
from kdecode.engine.request import (
    ChannelBudget,
    RequestError,
    SamplingParams,
    StructuredOutput,
)
from kdecode.engine.structured import Languages
from kdecode.model.tokenizer import Tokenizer

INF = float("inf")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(mini_checkpoint: Path) -> LLM:
    return LLM(mini_checkpoint, num_threads=1, max_context_tokens=256, max_requests=4)


def _tokenizer() -> Tokenizer:
    names = ["<end>", *(f"reserved {i}" for i in range(255))]
    return Tokenizer([bytes([byte]) for byte in range(256)] + [b"ab", b" a", b"12"], names)


def _adjusted(
    logits: list[float], prompt: tuple[int, ...], reply: list[int], **settings: Any
) -> Any:
    controls = Controls(SamplingParams(**settings), prompt, len(logits))
    for token in reply:
        controls.take(token)
    given = torch.tensor(logits)
    found = controls.adjust(given)
    assert given.tolist() == logits, "the model's logits are told as they are"
    return found.tolist()


def test_each_penalty_by_its_formula() -> None:
    logits, prompt, reply = [1.0, 2.0, -2.0, 0.5], (0,), [1, 1, 2]
    found = _adjusted(logits, prompt, reply, frequency_penalty=0.5)
    assert found == [1.0, 1.0, -2.5, 0.5]
    assert _adjusted(logits, prompt, reply, presence_penalty=-1.0) == [1.0, 3.0, -1.0, 0.5]
    # Tokens of the prompt count here, and logits below 0 are multiplied.
    assert _adjusted(logits, prompt, reply, repetition_penalty=2.0) == [0.5, 1.0, -4.0, 0.5]


def test_bias_and_allowed_tokens() -> None:
    found = _adjusted([1.0, 2.0, 3.0], (0,), [], logit_bias=((0, 5.0), (2, -100.0)))
    assert found == [6.0, 2.0, -97.0]
    found = _adjusted([1.0, 2.0, 3.0], (0,), [], allowed_token_ids=(0, 1), logit_bias=((2, 9.0),))
    assert found == [1.0, 2.0, -INF]


def test_the_last_token_of_a_bad_word_does_not_follow_the_others() -> None:
    controls = Controls(SamplingParams(bad_words=("x",)), (), 4, bad_ids=[(1,), (2, 3), (3, 3, 0)])
    seen = []
    for token in (2, 3, 3, 0):
        banned = (controls.adjust(torch.zeros(4)) == -INF).nonzero().flatten().tolist()
        seen.append(banned)
        controls.take(token)
    assert seen == [[1], [1, 3], [1], [0, 1]]


@pytest.mark.parametrize(
    ("reply", "forced"),
    [
        ([], None),
        ([5], None),
        ([5, 6], 1),
        ([5, 6, 1], 2),
        # Closed, or left by itself within the budget, or by drafts that held unseen.
        ([5, 6, 1, 2], None),
        ([5, 1], None),
        ([1, 6, 1], None),
        ([5, 6, 7], None),
    ],
)
def test_a_channel_is_closed_when_its_tokens_are_spent(
    reply: list[int], forced: int | None
) -> None:
    channel = ChannelBudget(2, closing=(1, 2), marks=frozenset((1, 3)))
    # What is banned, biased or not allowed matters no more then.
    settings = {"allowed_token_ids": (4, 5), "logit_bias": ((4, 100.0),)}
    found = _adjusted([0.0] * 8, (), reply, channel=channel, **settings)
    is_open = [token for token, logit in enumerate(found) if logit > -INF]
    assert is_open == ([4, 5] if forced is None else [forced])


def test_limits_that_leave_nothing_are_an_error() -> None:
    controls = Controls(SamplingParams(allowed_token_ids=(1,)), (), 3, bad_ids=[(1,)])
    with pytest.raises(ControlError, match="leave no token"):
        controls.adjust(torch.zeros(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias of token 3 is 101"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"bad_words": (" ",)}, "nothing but white space"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_tokens_that_do_not_exist_are_refused(name: str) -> None:
    value = ((515, 1.0),) if name == "logit_bias" else (515,)
    tokenizer = _tokenizer()
    params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"{name} has the token 515"):
        controls_of(params, (1,), (), tokenizer, Languages(tokenizer, 259))


def _follows(output: StructuredOutput, text: str, tokenizer: Tokenizer) -> tuple[bool, bool, bool]:
    """Whether the text is allowed token by token; may end; has to end."""
    matcher = Languages(tokenizer, 259).matcher(output, (259, 260, 7))
    for token in tokenizer.encode_text(text):
        if not bool(matcher.allowed()[token]):
            return False, False, False
        matcher.take(token)
    allowed = matcher.allowed()
    # Special end tokens follow where the model's own does; an ordinary one is text.
    assert bool(allowed[259]) == bool(allowed[260])
    return True, bool(allowed[259]), matcher.is_complete


@pytest.mark.parametrize(
    ("kind", "language", "text", "expected"),
    [
        ("choice", '["ab", "a 😀\\n\\"é"]', 'a 😀\n"é', (True, True, True)),
        ("choice", '["ab", "abc"]', "ab", (True, True, False)),
        ("choice", '["ab"]', "b", (False, False, False)),
        ("regex", "a+/[0-9]{2}", "aa/1", (True, False, False)),
        ("regex", "a+/[0-9]{2}", "aa/12", (True, True, True)),
        ("grammar", 'root ::= "a" root | "b"', "aab", (True, True, True)),
        ("grammar", 'start: "a"+ "b"', "b", (False, False, False)),
        ("json_schema", json.dumps(SCHEMA), '{"n": -12, "ok": true}', (True, True, True)),
        ("json_schema", json.dumps(SCHEMA), '{"n": "1', (False, False, False)),
        ("json_schema", "true", '{"any": [1, null]}', (True, True, True)),
    ],
)
def test_languages(kind: Any, language: str, text: str, expected: tuple[bool, ...]) -> None:
    assert _follows(StructuredOutput(kind, language), text, _tokenizer()) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"allOf": [{"type": "integer"}, {"type": "string"}]}'),
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"const": "\\ud800"}'),
        ("regex", "["),
        ("regex", "(?=a)b"),
        ("regex", "\ud800"),
        ("grammar", ""),
        ("grammar", "start: unknown"),
        ("choice", "[]"),
        ("choice", "[1]"),
        ("choice", f'["{"a" * 1_000_000}"]'),
    ],
)
def test_a_language_that_cannot_be_used_is_refused(kind: Any, text: str) -> None:
    tokenizer = _tokenizer()
    with pytest.raises(RequestError, match=kind):
        Languages(tokenizer, 259).prepare(StructuredOutput(kind, text))


def test_a_frame_binds_a_part_of_the_reply() -> None:
    output = StructuredOutput("choice", '["ab"]', frame="start: <[0-255]>* <[260]> @content")
    tokenizer = _tokenizer()
    matcher = Languages(tokenizer, 259).matcher(output, (259,))
    for token in (*b"anything", 260):
        assert bool(matcher.allowed()[token])
        matcher.take(token)
    # Text that is the only one left comes in the tokenizer's own tokens, here "ab".
    assert matcher.allowed().nonzero().flatten().tolist() == [256]


def test_replies_are_texts_of_their_language(llm: LLM) -> None:
    """A random model would say none of this; seeded, at a high temperature, every reply does."""
    output = StructuredOutput("json_schema", json.dumps(SCHEMA))
    for seed in range(5):
        params = SamplingParams(200, temperature=1.0, seed=seed, structured=output, ignore_eos=True)
        (reply,) = llm.generate(["a"], params)
        assert reply.finish_reason == "stop"
        document = json.loads(reply.text)
        assert isinstance(document["n"], int)
        assert isinstance(document["ok"], bool)
    params = SamplingParams(50, min_tokens=50, structured=StructuredOutput("choice", '["yes"]'))
    assert llm.generate(["a"], params)[0].text == "yes"


def test_a_language_without_a_way_on_ends_its_request_alone(llm: LLM) -> None:
    alone = llm.generate(["b"], SamplingParams(8, ignore_eos=True))[0].token_ids
    impossible = SamplingParams(
        8, structured=StructuredOutput("choice", '["yes"]'), bad_words=("y",)
    )
    numbers = [
        llm.add_request("a", impossible),
        llm.add_request("b", SamplingParams(8, ignore_eos=True)),
    ]
    while llm.loop.scheduler.has_work:
        llm.loop.step()
    broken, other = map(llm.loop.collect, numbers)
    assert broken.finish_reason == "error"
    assert broken.error is not None
    assert broken.is_refusal
    assert other.token_ids == alone
    assert llm.stats()["pages_used"] == llm.stats()["slots_used"] == 0


def test_controls_do_not_depend_on_batch_mates(llm: LLM) -> None:
    params = SamplingParams(
        24,
        temperature=0.8,
        seed=3,
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((5, 2.0),),
        bad_words=("the",),
    )
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in llm.generate(prompts, params)] == alone


def test_a_language_goes_on_after_a_preemption(mini_checkpoint: Path, llm: LLM) -> None:
    """Three requests whose pages run out: their text is neither cut nor begun anew."""
    budget = 3 * slot_bytes(llm.model_config) + 10 * page_bytes(llm.model_config, 8, "bf16")
    small = LLM(
        mini_checkpoint,
        num_threads=1,
        max_context_tokens=64,
        page_tokens=8,
        max_requests=3,
        cache_budget_bytes=budget,
    )
    language = StructuredOutput("regex", "[x-z]{20}[0-9]{20}")
    outputs = small.generate(["a", "b", "c"], SamplingParams(50, structured=language))
    assert sum(output.num_preemptions for output in outputs)
    for output in outputs:
        assert re.fullmatch(language.text, output.text), output


def test_logprobs_of_a_prompt_are_those_of_a_forced_reply(llm: LLM) -> None:
    """Over chunks, alone and with a neighbour: what teacher forcing says of the same tokens."""
    prompt = [(7 * i) % 900 for i in range(40)]
    params = SamplingParams(2, prompt_logprobs=2, ignore_eos=True)
    outputs = llm.generate([prompt, [3, 4]], params)
    rows = torch.log_softmax(llm.teacher_forced(prompt[:1], prompt[1:]).double(), -1)
    told = outputs[0].prompt_logprobs
    assert len(told) == 39
    assert len(outputs[1].prompt_logprobs) == 1
    # Prefill and decode round in another order; a row off by one would be off by several.
    for row, entry, token in zip(rows, told, prompt[1:], strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=0.5)
        assert entry.top[0][1] >= entry.top[1][1]
        assert (entry.rank == 1) == (entry.top[0][0] == token)
    same = llm.generate([prompt], SamplingParams(2, ignore_eos=True))[0]
    assert same.token_ids == outputs[0].token_ids
    assert same.prompt_logprobs == ()
