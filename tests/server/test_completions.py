"""/v1/completions and what the server tells about itself, by the `openai` client over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from served_model import CONTEXT, KEY, Served

from kdecode.engine.request import SamplingParams, StructuredOutput

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def _complete(served: Served, prompt: Any = "the cat sat", **settings: Any) -> Any:
    extra = {"ignore_eos": True, **settings.pop("extra_body", {})}
    settings = {"max_tokens": 8, "temperature": 0, **settings}
    return served.client.completions.create(
        model="mini", prompt=prompt, extra_body=extra, **settings
    )


def _post(served: Served, path: str, body: Any, **settings: Any) -> httpx.Response:
    settings = {"headers": HEADERS, **settings}
    return httpx.post(f"{served.url}{path}", json=body, **settings)


def test_a_completion_is_what_the_engine_says(served: Served) -> None:
    reply = _complete(served)
    assert reply.object == "text_completion"
    assert reply.choices[0].finish_reason == "length"
    ids = served.llm.tokenizer.encode_text("the cat sat")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 8)
    assert usage.total_tokens == len(ids) + 8
    assert usage.prompt_tokens_details.cached_tokens == 0
    same = _complete(served, ids)
    assert same.choices[0].text == reply.choices[0].text != ""


@pytest.mark.parametrize("prompt", [["a", "def f(x):"], [[1, 2, 3], [4, 5]]])
def test_a_list_of_prompts_has_a_choice_for_each(served: Served, prompt: list[Any]) -> None:
    reply = _complete(served, prompt, n=2)
    alone = [_complete(served, item).choices[0].text for item in prompt]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [text for text in alone for _ in "12"]


def test_the_pieces_of_a_stream_are_the_whole(served: Served) -> None:
    for settings in ({}, {"n": 3, "temperature": 1.0, "seed": 7}, {"stop": ["e"]}):
        whole = _complete(served, max_tokens=24, **settings)
        texts = {choice.index: "" for choice in whole.choices}
        reasons = {}
        for chunk in _complete(served, max_tokens=24, stream=True, **settings):
            assert chunk.usage is None
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert list(texts.values()) == [choice.text for choice in whole.choices]
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_ids_of_prompt_and_reply(served: Served) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    settings = {"max_tokens": 12, "echo": True, "extra_body": {"return_token_ids": True}}
    whole = _complete(served, prompts, **settings)
    assert [choice.prompt_token_ids for choice in whole.choices] == prompts
    assert [len(choice.token_ids) for choice in whole.choices] == [12, 12]
    ids: dict[int, list[int]] = {0: [], 1: []}
    told: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in _complete(served, prompts, stream=True, **settings):
        for choice in chunk.choices:
            ids[choice.index] += getattr(choice, "token_ids", [])
            told[choice.index].append(getattr(choice, "prompt_token_ids", None))
    assert ids == {choice.index: choice.token_ids for choice in whole.choices}
    assert [[prompt for prompt in told[i] if prompt] for i in told] == [[p] for p in prompts]
    assert [told[i][0] for i in told] == prompts
    scored = _complete(served, [1, 2], **{**settings, "max_tokens": 0})
    assert scored.choices[0].token_ids == []
    plain = _complete(served, [1, 2])
    assert not hasattr(plain.choices[0], "token_ids")


def test_usage_comes_when_asked_and_with_no_choices(served: Served) -> None:
    options = {"include_usage": True}
    *chunks, last = _complete(served, stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks)
    options["continuous_usage_stats"] = True
    chunks = list(_complete(served, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_the_lines_of_a_stream(served: Served) -> None:
    body = {"model": "mini", "prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}
    response = _post(served, "/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    documents = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert documents[-1]["choices"][0]["finish_reason"] == "length"


def test_a_seed_gives_the_same_text_and_its_choices_differ(served: Served) -> None:
    settings = {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 16}
    first, again = (_complete(served, **settings) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] != texts[1]
    alone = _complete(served, **{**settings, "seed": 6, "n": 1})
    assert alone.choices[0].text == texts[1]


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    text = _complete(served, max_tokens=24).choices[0].text
    stop = text[5:8]
    reply = _complete(served, max_tokens=24, stop=[stop, "never there"])
    assert reply.choices[0].text == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens < 24
    longer = _complete(served, max_tokens=24, stop=stop, extra_body={"min_tokens": 24})
    assert longer.usage.completion_tokens == 24


def test_stop_token_ids_end_a_reply(served: Served) -> None:
    reply = _complete(served, max_tokens=24, logprobs=0)
    tokens = served.llm.tokenizer.encode_text(reply.choices[0].logprobs.tokens[3])
    stopped = _complete(served, max_tokens=24, extra_body={"stop_token_ids": tokens})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens <= 4


def test_echo_is_the_prompt_in_front(served: Served) -> None:
    text = _complete(served).choices[0].text
    assert _complete(served, echo=True).choices[0].text == "the cat sat" + text


def test_echo_with_logprobs_scores_a_prompt(served: Served) -> None:
    """What evaluations of likelihood send; the values are those of the engine."""
    ids = served.llm.tokenizer.encode_text("the cat sat 猫")
    for max_tokens in (0, 2):
        reply = _complete(served, ids, echo=True, logprobs=1, max_tokens=max_tokens)
        told = reply.choices[0].logprobs
        assert len(told.tokens) == len(told.text_offset) == len(ids) + max_tokens
        assert reply.usage.completion_tokens == max_tokens
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert all(len(top) == 1 for top in told.top_logprobs[1:])
        assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].text.startswith("the cat sat 猫")
    exact = _complete(served, ids, max_tokens=1, extra_body={"prompt_logprobs": 1})
    entries = exact.choices[0].prompt_logprobs
    assert entries[0] is None
    values = [entry[str(token)] for entry, token in zip(entries[1:], ids[1:], strict=True)]
    assert [value["logprob"] for value in values] == told.token_logprobs[1 : len(ids)]
    assert all(value["rank"] >= 1 and "decoded_token" in value for value in values)
    chunks = list(_complete(served, ids, echo=True, logprobs=1, max_tokens=2, stream=True))
    assert [v for c in chunks for v in c.choices[0].logprobs.token_logprobs] == told.token_logprobs


def test_logprobs_of_a_completion(served: Served) -> None:
    reply = _complete(served, logprobs=2, max_tokens=4)
    told = reply.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 4
    for token, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert value == max(top.values()) < 0
        assert token in top
    assert told.text_offset[0] == 0
    streamed = list(_complete(served, logprobs=2, max_tokens=4, stream=True))
    values = [v for chunk in streamed for v in chunk.choices[0].logprobs.token_logprobs]
    assert values == told.token_logprobs
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    named = _complete(served, logprobs=2, max_tokens=4, extra_body=asked).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in named.token_ids]
    assert named.logprobs.text_offset == told.text_offset
    for token, top in zip(named.logprobs.tokens, named.logprobs.top_logprobs, strict=True):
        assert max(top, key=top.__getitem__) == token


def test_callers_at_once_get_what_each_gets_alone(served: Served) -> None:
    """Up to a near-tie: a step of several rows rounds in another order than one of one row."""
    prompts = ["a", "the cat", "def f(x):", "1 2 3", "hello world", "x", "y z"]

    def tokens(prompt: str) -> tuple[list[str], list[dict[str, float]]]:
        told = _complete(served, prompt, logprobs=2).choices[0].logprobs
        return told.tokens, told.top_logprobs

    alone = [tokens(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(tokens, prompts))
    same = 0
    for (expected, tops), (found, _) in zip(alone, together, strict=True):
        differs = [
            i for i, pair in enumerate(zip(expected, found, strict=True)) if len({*pair}) > 1
        ]
        same += not differs
        if differs:
            first, second = sorted(tops[differs[0]].values())[::-1]
            assert first - second < 0.1
    assert same >= len(prompts) - 2


def test_a_prompt_that_is_too_long_says_so(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="context length is 2,048 tokens") as caught:
        _complete(served, [1] * CONTEXT, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert _complete(served, [1] * (CONTEXT - 1), max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "0 prompts with n 1 make 0 choices"),
        ({"prompt": [[]]}, "The prompt has no tokens"),
        ({"prompt": [-1]}, "Token 0 of the prompt is -1"),
        ({"prompt": [10**9]}, "the vocabulary has"),
        ({"prompt": ["a"] * 100, "n": 2}, "make 200 choices"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"word": 1}}, "'word' is not the id of a token"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias has the token 99999"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": [" "]}, "white space"),
        ({"max_tokens": 0}, "without echo, it must be at least 1"),
        ({"prompt_logprobs": 1, "stream": True}, "streams have none"),
        ({"guided_regex": "["}, "The regex cannot be used"),
        ({"guided_json": "{"}, "The json_schema cannot be used"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"xml": ""}}, "structured_outputs.xml"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "give one of them"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is needed"),
        ({"best_of": 3}, "best_of is 3"),
        ({"include_stop_str_in_output": True}, "serves only False"),
        ({"thinking_token_budget": 3}, "'thinking_token_budget' is not a field"),
        ({"beam_me": True}, "'beam_me' is not a field"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop has an empty text"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ({"stream_options": {"include_usage": True}}, "stream is not true"),
        ({"stream": True, "prompt": [10**9]}, "the vocabulary has"),
    ],
)
def test_what_cannot_be_served_is_refused(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    response = _post(served, "/v1/completions", {"model": "mini", "prompt": "a", **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_fields_that_ask_for_nothing_are_accepted(served: Served) -> None:
    body = {"model": "alias", "prompt": "a", "max_tokens": 1, "user": "u", "best_of": 1}
    body |= {
        "length_penalty": 1.0,
        "response_format": {"type": "text"},
        "logit_bias": None,
        "stop": None,
        "beam_me": None,
        "top_k": -1,
    }
    response = _post(served, "/v1/completions", body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "alias"


def test_bodies_that_are_no_json_objects(served: Served) -> None:
    bodies = {
        b"{": "not JSON",
        b"[1]": "must be a JSON object",
        b"": "",
        b"\xff": "",
        b'{"model": NaN}': "model",
        b"[" * 50_000: "",
        b'{"model": "mini", "prompt": "a", "temperature": NaN}': "temperature",
        b'{"model": "mini", "prompt": "a", "seed": %s}' % (b"9" * 5000): "",
    }
    for content, message in bodies.items():
        response = httpx.post(f"{served.url}/v1/completions", content=content, headers=HEADERS)
        assert response.status_code == 400, content[:10]
        assert message in response.json()["error"]["message"]
    headers = {"Authorization": HEADERS["Authorization"]}
    response = httpx.post(f"{served.url}/v1/completions", content=b"{}", headers=headers)
    assert "Content-Type application/json" in response.json()["error"]["message"]


def test_unknown_models_and_paths(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; mini, alias is"):
        served.client.completions.create(model="other", prompt="a")
    response = httpx.get(f"{served.url}/v2", headers=HEADERS)
    assert (response.status_code, response.json()["error"]["message"]) == (404, "Not Found")


def test_lone_surrogates_do_no_harm(served: Served) -> None:
    body = b'{"model": "mini", "prompt": "a\\ud800b", "max_tokens": 1, "echo": true}'
    response = httpx.post(f"{served.url}/v1/completions", content=body, headers=HEADERS)
    assert response.json()["choices"][0]["text"].startswith("a\ufffdb")
    body = b'{"model": "\\ud800", "prompt": "a"}'
    response = httpx.post(f"{served.url}/v1/completions", content=body, headers=HEADERS)
    assert response.status_code == 404
    assert "'\\ud800' is not served here" in response.json()["error"]["message"]


def test_models_health_version_and_fingerprint(served: Served) -> None:
    models = served.client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [
        ("mini", CONTEXT),
        ("alias", CONTEXT),
    ]
    assert served.client.models.retrieve("alias").id == "alias"
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/version").json()["version"]
    document = httpx.get(f"{served.url}/config/fingerprint", headers=HEADERS).json()
    assert document["config"] == json.loads(json.dumps(served.llm.resolved_config()))
    assert document["hardware"]["count"] == 1
    reply = _complete(served, max_tokens=1)
    assert reply.system_fingerprint == document["digest"]


def test_tokenize_and_back(served: Served) -> None:
    text = "the cat 猫 <|open|>"
    tokens = _post(served, "/tokenize", {"prompt": text}).json()
    assert tokens["tokens"] == served.llm.tokenizer.encode_text(text)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), CONTEXT)
    assert _post(served, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    assert _post(served, "/detokenize", {"tokens": [10**9]}).status_code == 400
    assert _post(served, "/tokenize", {}).status_code == 400
    info = httpx.get(f"{served.url}/tokenizer_info", headers=HEADERS).json()
    assert info["eos_token"] == served.llm.tokenizer.decode([served.llm.model_config.eos_id])
    assert info["vocab_size"] == served.llm.tokenizer.vocab_size


def test_a_step_that_breaks_is_a_500_and_the_server_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: Any) -> Any:
        raise RuntimeError("a made-up fault")

    with monkeypatch.context() as patch:
        patch.setattr(served.llm.loop._worker, "execute", broken)
        with pytest.raises(openai.InternalServerError, match="a made-up fault"):
            _complete(served)
        with pytest.raises(openai.APIError, match="a made-up fault"):
            list(_complete(served, stream=True))
    assert _complete(served).usage.completion_tokens == 8


def test_sampling_parameters_arrive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    add = served.llm.add_request

    def spy(prompt: Any, params: SamplingParams, **settings: Any) -> int:
        seen.append(params)
        return add(prompt, params, **settings)

    monkeypatch.setattr(served.llm, "add_request", spy)
    extra = {"top_k": 3, "min_p": 0.1, "min_tokens": 1, "stop_token_ids": [4, 4]}
    extra |= {"repetition_penalty": 1.1, "allowed_token_ids": [97, 98], "bad_words": ["x y"]}
    extra |= {"structured_outputs": {"regex": "[a-z]*"}, "prompt_logprobs": 0}
    settings = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": "z", "max_tokens": 2}
    settings |= {"presence_penalty": 0.25, "frequency_penalty": -1, "logit_bias": {"7": -3}}
    _complete(served, extra_body=extra, **settings)
    _post(served, "/v1/completions", {"model": "mini", "prompt": "a"})
    assert seen == [
        SamplingParams(
            *(2, 0.5, 3, 0.9, 0.1, 1, (4,), ("z",), True, 1, None, 0, 0.25, -1.0, 1.1),
            logit_bias=((7, -3.0),),
            allowed_token_ids=(97, 98),
            bad_words=("x y",),
            structured=StructuredOutput("regex", "[a-z]*"),
        ),
        SamplingParams(16, temperature=1.0),
    ]
