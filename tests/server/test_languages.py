"""Answers in a language and calls that have to be made: what a random model is bound to say."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from replies import USER, k3_tokenizer, reply_ids
from served_model import Served

from kdecode.engine.request import RequestError, StructuredOutput
from kdecode.engine.structured import Languages
from kdecode.server.languages import K3Grammar

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "word": {"type": "string"},
        "n": {"type": "integer", "minimum": 3},
        "mode": {"enum": ["a", "b", None]},
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "size": {"type": ["number", "string"]},
        "any": {},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
    },
    "required": ["word"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": 'look_"up&', "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "free"}},
    {
        "type": "function",
        "function": {"name": "none", "parameters": {"additionalProperties": False}},
    },
]
ARGUMENTS = {
    "word": "a <b> 猫",
    "n": 5,
    "mode": None,
    "place": {"x": 1},
    "size": 1.5,
    "any": [1, {}],
    "places": [{"x": 2}],
}
TOKENIZER = k3_tokenizer()
END = TOKENIZER.special_id("<|end_of_msg|>")


def _message(*calls: tuple[str, dict[str, Any]], content: str = "") -> dict[str, Any]:
    functions = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    return {"reasoning": "hm", "content": content, "tool_calls": functions}


def _rest(output: StructuredOutput, message: dict[str, Any], *, thinking: bool) -> str | None:
    """What of the reply comes after the language has ended it; None where it is not allowed."""
    matcher = Languages(TOKENIZER, END).matcher(output, (END,))
    ids = reply_ids(TOKENIZER, message, thinking=thinking)
    for place, token in enumerate(ids):
        if matcher.is_complete:
            return TOKENIZER.decode(ids[place:])
        if not bool(matcher.allowed()[token]):
            return None
        matcher.take(token)
    return ""


CALL = ('look_"up&', ARGUMENTS)
FREE = ("free", {"any": "text", "n": 1})
AFTER_CALLS = "tools<|sep|><|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("message", "rest"),
    [
        (_message(CALL), AFTER_CALLS),
        (_message(FREE, CALL, ("none", {})), AFTER_CALLS),
        (_message(content="no call"), None),
        (_message(("unknown", {})), None),
        (_message(("none", {"n": 1})), None),
        (_message(('look_"up&', {"n": 5})), None),
        (_message(('look_"up&', {"word": "a", "n": 1})), None),
        (_message(('look_"up&', {"word": "a", "mode": "c"})), None),
        (_message(('look_"up&', {"word": "a", "other": "c"})), None),
    ],
)
def test_calls_have_the_form_of_their_declarations(
    thinking: bool, message: dict[str, Any], rest: str | None
) -> None:
    grammar = K3Grammar(TOKENIZER, thinking=thinking)
    output = grammar.calls(TOOLS, name=None, can_repeat=True)
    assert _rest(output, message, thinking=thinking) == rest


def test_a_named_tool_is_called_once() -> None:
    output = K3Grammar(TOKENIZER, thinking=True).calls(TOOLS, name="free", can_repeat=True)
    assert _rest(output, _message(FREE), thinking=True) == AFTER_CALLS
    assert _rest(output, _message(CALL), thinking=True) is None
    assert _rest(output, _message(FREE, FREE), thinking=True) is None
    with pytest.raises(RequestError, match="'other'"):
        K3Grammar(TOKENIZER, thinking=True).calls(TOOLS, name="other", can_repeat=True)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_in_a_language_or_calls_instead(thinking: bool) -> None:
    choice = StructuredOutput("choice", '["yes", "no"]')
    rest = "response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    for tools in ((), TOOLS):
        output = K3Grammar(TOKENIZER, thinking=thinking).answer(choice, tools)
        assert _rest(output, {"reasoning": "no", "content": "yes"}, thinking=thinking) == rest
        assert _rest(output, {"content": "maybe"}, thinking=thinking) is None
        found = _rest(output, _message(CALL), thinking=thinking)
        assert found == (AFTER_CALLS if tools else None)


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_tool_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(RequestError, match="must be a text"):
        K3Grammar(TOKENIZER, thinking=True).calls(
            [{"function": {"name": name}}], name=None, can_repeat=True
        )


def _chat(served: Served, **settings: Any) -> Any:
    settings = {"temperature": 1.0, "seed": 1, "max_tokens": 600, **settings}
    return served.client.chat.completions.create(
        model="mini", messages=[USER], reasoning_effort="none", **settings
    )


@pytest.mark.parametrize(
    "settings",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_chats_answer_in_json(served: Served, settings: dict[str, Any], stream: bool) -> None:
    reply = _chat(served, stream=stream, **settings)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        reason = chunks[-1].finish_reason
    else:
        content, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    document = json.loads(content)
    assert document.keys() == {"n", "ok"}
    assert isinstance(document["ok"], bool)
    assert reason == "stop"


def test_other_languages(served: Served) -> None:
    for name, value, texts in (
        ("guided_choice", ["yes", "no"], {"yes", "no"}),
        ("guided_regex", "[xyz]", set("xyz")),
        ("guided_grammar", 'root ::= "do" | "re"', {"do", "re"}),
    ):
        reply = _chat(served, extra_body={name: value})
        assert reply.choices[0].message.content in texts
        reply = served.client.completions.create(
            model="mini", prompt="a", max_tokens=20, extra_body={name: value}
        )
        assert reply.choices[0].text in texts
    reply = _chat(served, response_format={"type": "json_object"}, max_tokens=60)
    assert reply.choices[0].message.content.startswith("{")


def test_a_language_without_a_way_on_is_the_clients_error(served: Served) -> None:
    extra = {"guided_choice": ["yes"], "bad_words": ["y"]}
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(served, extra_body=extra)
    assert caught.value.code == "nothing_can_follow"
    with pytest.raises(openai.APIError, match="no token that could follow"):
        list(_chat(served, extra_body=extra, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_has_to_be_made(served: Served, stream: bool) -> None:
    """Streamed pieces and the whole reply are of one seed, so they are the same call."""
    parameters = {
        "type": "object",
        "properties": {"mode": {"enum": ["on", "off"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["mode", "n"],
    }
    tools = [{"type": "function", "function": {"name": "switch", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "switch"}}):
        settings = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        message = _chat(served, **settings).choices[0].message
        (call,) = message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (message.content, call.function.name) == (None, "switch")
        assert arguments["mode"] in ("on", "off")
        assert isinstance(arguments["n"], int)
        if stream:
            chunks = [chunk.choices[0] for chunk in _chat(served, stream=True, **settings)]
            pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
            text = "".join(piece.function.arguments for piece in pieces)
            assert text == call.function.arguments
            assert chunks[-1].finish_reason == "tool_calls"
