"""Chat encoding: K3's markup piece by piece, user text that looks like markup, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdecode.model.chat import (
    K3_MARKERS,
    ChatError,
    Piece,
    ReplyStream,
    chat_format,
    encode_chat,
    render_k3,
    split_reply,
)
from kdecode.model.tokenizer import Tokenizer, write_tokenizer

VOCAB = 2048
USER = {"role": "user", "content": "Hi"}
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how '
    "much to think in your thinking channel (not including the response channel), supported "
    "values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
    "`thinking_effort={}`.<|close|>message<|sep|><|end_of_msg|>"
)
HI = '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
REPLY = '<|open|>message role="assistant"<|sep|><|open|>{}<|sep|>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, VOCAB, seed=0)
    return Tokenizer.from_directory(directory, VOCAB)


def text_of(messages: list[dict[str, Any]], **options: Any) -> str:
    return "".join(piece.text for piece in render_k3(messages, **options))


def body_of(message: dict[str, Any], thinking: bool = True) -> str:
    """What one message adds to an otherwise empty conversation."""
    whole, empty = text_of([message], thinking=thinking), text_of([], thinking=thinking)
    reply = REPLY.format("think" if thinking else "response")
    return whole.removeprefix(empty.removesuffix(reply)).removesuffix(reply)


def test_prompt_with_thinking() -> None:
    assert text_of([USER]) == EFFORT.format("max") + HI + REPLY.format("think")
    assert text_of([USER], effort="low") == EFFORT.format("low") + HI + REPLY.format("think")


def test_prompt_without_thinking() -> None:
    assert text_of([USER], thinking=False) == HI + REPLY.format("response")


def test_tools_come_first_with_sorted_compact_json() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "天气"}}]
    declared = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n"
        '```json\n[{"function":{"description":"天气","name":"f"},"type":"function"}]\n```'
        "<|close|>message<|sep|><|end_of_msg|>"
    )
    assert text_of([USER], tools=tools) == declared + text_of([USER])


def test_pieces_are_separate_and_attributes_are_four() -> None:
    assert render_k3([{**USER, "name": 'a"&b'}], thinking=False)[:11] == [
        Piece("<|open|>", is_marker=True),
        Piece("message"),
        Piece(" role"),
        Piece('="'),
        Piece("user"),
        Piece('"'),
        Piece(" name"),
        Piece('="'),
        Piece("a&quot;&amp;b"),
        Piece('"'),
        Piece("<|sep|>", is_marker=True),
    ]


def test_ids_are_the_pieces_encoded_one_by_one(tokenizer: Tokenizer) -> None:
    special = tokenizer.special_id
    text = tokenizer.encode_text
    expected = [special("<|open|>"), *text("message"), *text(" role"), *text('="'), *text("user")]
    expected += [*text('"'), special("<|sep|>"), *text("Hi"), special("<|close|>")]
    expected += [*text("message"), special("<|sep|>"), special("<|end_of_msg|>")]
    assert encode_chat(tokenizer, [USER], thinking=False)[: len(expected)] == expected


@settings(max_examples=30, deadline=None)
@given(
    content=st.lists(st.sampled_from([*K3_MARKERS, "[EOS]", "message", ' role="', "x"])).map(
        "".join
    )
)
def test_user_text_is_never_markup(tokenizer: Tokenizer, content: str) -> None:
    def specials(text: str) -> list[int]:
        ids = encode_chat(tokenizer, [{"role": "user", "content": text, "name": text}])
        return [token_id for token_id in ids if tokenizer.is_special(token_id)]

    assert specials(content) == specials("x")
    if content:
        assert content in tokenizer.decode(encode_chat(tokenizer, [{**USER, "content": content}]))


def test_assistant_channels() -> None:
    message = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert body_of(message) == (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>hm<|close|>think<|sep|>'
        "<|open|>response<|sep|>yes<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    assert body_of({"role": "assistant", "content": "yes", "reasoning": "hm"}) == body_of(message)
    empty = body_of({"role": "assistant", "content": "yes"})
    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response" in empty
    assert "think" not in body_of(message, thinking=False)


def call(name: str, arguments: object, call_id: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def test_tool_calls_have_typed_arguments() -> None:
    arguments = {"s": 'a"b', "n": 1.5, "b": True, "z": None, "o": {"k": 1}, "l": [1, 2]}
    rendered = body_of(
        {"role": "assistant", "tool_calls": [call("f", arguments), call("g", "{not json")]}
    )

    def argument(key: str, kind: str, body: str) -> str:
        opened = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
        return f"{opened}{body}<|close|>argument<|sep|>"

    expected = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        + argument("s", "string", 'a"b')
        + argument("n", "number", "1.5")
        + argument("b", "boolean", "true")
        + argument("z", "null", "null")
        + argument("o", "object", '{"k": 1}')
        + argument("l", "array", "[1, 2]")
        + '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{not json<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    assert rendered.endswith("<|close|>response<|sep|>" + expected)
    as_text = body_of({"role": "assistant", "tool_calls": [call("f", '{"s": 1}')]})
    assert as_text == body_of({"role": "assistant", "tool_calls": [call("f", {"s": 1})]})


def test_tool_results_follow_the_order_of_the_calls() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("f", {}, "a"), call("g", {}, "b")]}
    first = {"role": "tool", "tool_call_id": "a", "content": "one"}
    second = {"role": "tool", "tool_call_id": "b", "content": "two"}
    rendered = text_of([assistant, second, first])
    assert rendered == text_of([assistant, first, second])
    one = '<|open|>message role="tool" tool="f" index="1"<|sep|>one<|close|>message<|sep|>'
    two = '<|open|>message role="tool" tool="g" index="2"<|sep|>two<|close|>message<|sep|>'
    assert f"{one}<|end_of_msg|>{two}<|end_of_msg|>" in rendered


def test_tool_results_without_ids_keep_their_order() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("f", {}), call("g", {})]}
    rendered = text_of([assistant, {"role": "tool", "content": "1"}, {"role": "tool", "name": "h"}])
    assert 'tool="f" index="1"<|sep|>1<' in rendered
    assert 'tool="h" index="2"<|sep|><' in rendered


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert text_of([{"role": "user", "content": parts}]) == text_of([USER])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"role": "robot", "content": "x"}], {}, r"messages\[0\].*'robot'"),
        (["Hi"], {}, r"messages\[0\].*None"),
        ([USER, {"role": "user", "content": 3}], {}, r"messages\[1\].content.*3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "'image_url'"),
        ([{"role": "tool", "content": "x"}], {}, "answers no call"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], {}, "names no function"),
        ([{"role": "assistant", "tool_calls": "f"}], {}, "must be a list of objects"),
        ([{"role": "assistant", "tool_calls": [call("f", "[1]")]}], {}, "must be an object"),
        ([{"role": "assistant", "reasoning": 3}], {}, "reasoning must be text"),
        ([{"role": "system", "tools": [{}]}], {}, "inside a message"),
        (
            [USER],
            {"effort": "medium"},
            r"'medium'; it must be low, high or max\. The released encoder .* lists medium",
        ),
        ([USER], {"tools": ["f"]}, "tools must be a list of objects"),
    ],
)
def test_refusals(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatError, match=message):
        render_k3(messages, **options)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("cut", [None, 3, 5, 7])
def test_split_reply(tokenizer: Tokenizer, thinking: bool, cut: int | None) -> None:
    special = tokenizer.special_id
    text = tokenizer.encode_text

    def tag(marker: str, name: str) -> list[int]:
        return [special(marker), *text(name), special("<|sep|>")]

    parts = [text("hm <|close|>"), tag("<|close|>", "think"), tag("<|open|>", "response")]
    if not thinking:
        parts = [[], [], []]
    parts += [text("yes"), tag("<|close|>", "response"), tag("<|open|>", "tools"), text("call")]
    parts += [tag("<|close|>", "tools"), [special("<|end_of_msg|>")], text("after")]
    ids = [token_id for part in parts[:cut] for token_id in part]
    reasoning, response = split_reply(tokenizer, ids, thinking)
    # What a stream shows before the reply's first tag.
    stream = ReplyStream(tokenizer, thinking)
    early = "".join(stream.push(token_id)[0] for token_id in parts[0])
    assert early == ("hm <|close|>" if thinking else "")
    assert reasoning == ("hm <|close|>" if thinking else "")
    assert response == ("" if cut == 3 else "yes")


def kimi_linear_tokenizer() -> Tokenizer:
    names = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]
    names += [f"reserved {i}" for i in range(256 - len(names))]
    return Tokenizer([bytes([byte]) for byte in range(256)], names)


def test_kimi_linear_template() -> None:
    tokenizer = kimi_linear_tokenizer()
    ids = encode_chat(tokenizer, [{"role": "system", "content": "S"}, USER])
    assert tokenizer.decode(ids) == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    end = tokenizer.special_id("<|im_end|>")
    assert split_reply(tokenizer, [*tokenizer.encode_text("yes"), end, 65]) == ("", "yes")
    with pytest.raises(ChatError, match="Tools are not supported"):
        encode_chat(tokenizer, [USER], tools=[{"type": "function"}])
    with pytest.raises(ChatError, match="'tool'"):
        encode_chat(tokenizer, [{"role": "tool", "content": ""}])


def test_tokenizer_without_chat_markers_is_refused() -> None:
    names = [f"reserved {i}" for i in range(256)]
    bare = Tokenizer([bytes([byte]) for byte in range(256)], names)
    with pytest.raises(ChatError, match="neither"):
        chat_format(bare)
