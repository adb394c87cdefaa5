"""K3's reply parser: round trips with the encoder, cut replies, malformed ones, stop strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import encode, k3_tokenizer, parse, reply_ids, texts

from kdecode.model.chat import CLOSE, OPEN, SEP, Piece, split_reply
from kdecode.server.parser import K3Parser

TOKENIZER = k3_tokenizer()
MARKERS = {name: TOKENIZER.special_id(name) for name in (OPEN, CLOSE, SEP, "<|end_of_msg|>")}
TEXT = st.text(st.sampled_from("aé猫😀\n\"\\&<|open|> {}'"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
# A key is an attribute of a tag, where the encoder has no way to write a line's end or a space.
KEYS = st.text(st.sampled_from('abé猫"&'), min_size=1, max_size=5)
CALLS = st.lists(
    st.tuples(st.text("ab_", min_size=1, max_size=5), st.dictionaries(KEYS, JSON, max_size=3)),
    max_size=3,
)


def _parser(**settings: Any) -> K3Parser:
    return K3Parser(TOKENIZER, **{"thinking": True, "has_tools": True, **settings})


def _ids(*parts: str) -> list[int]:
    """Text and tags: "@think" opens a channel, "/think" closes it."""
    pieces: list[Piece] = []
    for part in parts:
        if part[:1] in ("@", "/"):
            marker = OPEN if part[0] == "@" else CLOSE
            pieces += [Piece(marker, True), Piece(part[1:]), Piece(SEP, True)]
        else:
            pieces.append(Piece(part))
    return encode(TOKENIZER, pieces)


def _message(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> Any:
    named = [{"function": {"name": name, "arguments": dict(args)}} for name, args in calls]
    return {"reasoning": reasoning, "content": content, "tool_calls": named}


@settings(max_examples=25, deadline=None)
@given(TEXT, TEXT, CALLS, st.booleans())
def test_what_the_encoder_writes_is_read_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    ids = reply_ids(TOKENIZER, _message(reasoning, content, calls), thinking=thinking)
    found = texts(parse(_parser(thinking=thinking), ids, "stop"))
    # The encoder leaves out reasoning of nothing but spaces.
    assert found["reasoning"] == (reasoning if thinking and reasoning.strip() else "")
    assert found["content"] == content
    assert [(name, json.loads(args)) for name, args in found["calls"]] == calls


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_tokens_are_split_as_the_whole_is(data: st.DataObject) -> None:
    names = ["think", "response", "tools", "call", "argument", "json", "x"]
    tags = [f"{marker}{name}" for marker in "@/" for name in names]
    tags += ['@call tool="f"', '@argument key="k" type="number"', '@argument key="k"']
    loose = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=4)
    markers = st.sampled_from([*MARKERS.values(), TOKENIZER.special_id("<|other|>")])
    parts = data.draw(
        st.lists(
            st.sampled_from(tags).map(_ids) | loose | markers.map(lambda i: [i]) | TEXT.map(_ids)
        )
    )
    ids = [token for part in parts for token in part]
    for thinking in (True, False):
        found = texts(parse(_parser(thinking=thinking), ids))
        assert (found["reasoning"], found["content"]) == split_reply(TOKENIZER, ids, thinking)


@settings(max_examples=8, deadline=None)
@given(TEXT, TEXT, CALLS)
def test_every_prefix_is_a_prefix(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    ids = reply_ids(TOKENIZER, _message(reasoning, content, calls))
    whole = texts(parse(_parser(), ids))
    for cut in range(1, len(ids)):
        found = texts(parse(_parser(), ids[:cut]))
        # A character that was cut is U+FFFD at the end of its text.
        assert whole["reasoning"].startswith(found["reasoning"].rstrip("\ufffd"))
        assert whole["content"].startswith(found["content"].rstrip("\ufffd"))
        names = [name for name, _ in whole["calls"]]
        assert [name for name, _ in found["calls"]] == names[: len(found["calls"])]


def test_a_cut_reply_stays_in_the_channel_that_the_prompt_opened() -> None:
    ids = _ids("still thinking")
    assert texts(parse(_parser(), ids))["reasoning"] == "still thinking"
    assert texts(parse(_parser(thinking=False), ids))["content"] == "still thinking"


def test_channels_may_be_left_without_being_closed() -> None:
    call = ('@call tool="f" index="1"', '@argument key="k" type="number"', "1", "/argument")
    for ids in (
        _ids("hm", "@tools", *call, "/call"),
        _ids("hm", *call, "@response"),
        _ids("hm", *call[:3], "/message"),
    ):
        found = texts(parse(_parser(), ids))
        assert (found["reasoning"], found["calls"]) == ("hm", [["f", '{"k": 1}']])
    assert texts(parse(_parser(), _ids("hm", "@response", "yes")))["content"] == "yes"


def test_no_marker_ever_becomes_text() -> None:
    ids = [MARKERS[SEP], *_ids("a"), TOKENIZER.special_id("<|other|>"), *_ids("b"), MARKERS[OPEN]]
    assert texts(parse(_parser(), ids))["reasoning"] == "ab"


def test_text_that_looks_like_markup_is_text() -> None:
    text = "<|close|>think<|sep|><|open|>response<|sep|>"
    assert texts(parse(_parser(), _ids(text)))["reasoning"] == text


@pytest.mark.parametrize(
    ("value", "arguments"),
    [("1e5", "1e5"), (" [1, 2] ", "[1, 2]"), ("1,}", '"1,}"'), ("NaN", '"NaN"'), ("", '""')],
)
def test_arguments_are_json_whatever_the_model_says(value: str, arguments: str) -> None:
    ids = _ids('@call tool="f"', '@argument key="k" type="number"', value, "/argument", "/call")
    assert texts(parse(_parser(), ids))["calls"] == [["f", f'{{"k": {arguments}}}']]


def test_a_json_element_is_passed_on_as_it_is() -> None:
    ids = _ids('@call tool="f"', '@json type="object"', '{"a": 1', "}", "/json", "/call")
    assert texts(parse(_parser(), ids))["calls"] == [["f", '{"a": 1}']]


def test_without_tools_there_are_no_calls() -> None:
    ids = _ids("hm", "@tools", '@call tool="f"', "/call", "/tools", "@response", "yes")
    found = texts(parse(_parser(has_tools=False), ids))
    assert found == {"reasoning": "hm", "content": "yes", "calls": []}


@pytest.mark.parametrize("stop", ["five", "e s", "😀", "x five"])
def test_a_stop_string_ends_the_answer_and_only_the_answer(stop: str) -> None:
    text = "four x five six 😀 seven"
    ids = _ids(text, "/think", "@response", text, "/response")
    parser = _parser(stop=(stop,))
    found = texts(parse(parser, ids))
    assert parser.is_stopped
    assert found["reasoning"] == text
    assert found["content"] == text[: text.index(stop)]


def test_text_that_only_begins_a_stop_string_is_shown_at_the_end() -> None:
    parser = _parser(stop=("five",))
    found = texts(parse(parser, _ids("/think", "@response", "fi")))
    assert (found["content"], parser.is_stopped) == ("fi", False)


def test_a_stop_string_counts_from_min_tokens_on() -> None:
    ids = _ids("/think", "@response", "ab", "ab")
    parser = _parser(stop=("b",), min_tokens=len(ids))
    assert texts(parse(parser, ids))["content"] == "aba"


def test_reasoning_tokens_are_those_of_its_text() -> None:
    parser = _parser()
    ids = _ids("abc", "/think", "@response", "xy")
    parse(parser, ids)
    assert parser.num_reasoning_tokens == 3 < len(ids)
