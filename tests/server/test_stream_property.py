"""A stream's pieces, put together, are the whole reply: for any tokens and any settings.

A token is an event, whether it came alone or with others in one step of the engine. What varies is
where tokens cut characters, markers, tags and stop strings, and where the reply ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from replies import k3_tokenizer

from kdecode.engine.loop import Event
from kdecode.engine.text import TextStream
from kdecode.model.tokenizer import IncrementalDetokenizer
from kdecode.server.parser import K3Parser
from kdecode.server.schema import ChatRequest, CompletionRequest
from kdecode.server.stream import ChatChoice, CompletionChoice

TOKENIZER = k3_tokenizer()
# Markers, tag names, letters of stop strings, parts of characters, and anything else.
TOKENS = st.one_of(
    st.sampled_from(list(TOKENIZER.special_ids.values())[:5]),
    st.sampled_from([*b"thinkrespotcalj ", *"猫😀".encode()]),
    st.integers(0, TOKENIZER.vocab_size - 1),
    # Whole tags, which single tokens seldom make.
    st.sampled_from(["think", "response", "tools", 'call tool="f" index="1"', "argument"]),
)
STOPS = st.lists(st.sampled_from(["th", "in", "猫", "not there"]), max_size=2)


def _ids(items: Sequence[int | str]) -> list[int]:
    special = TOKENIZER.special_id
    ids: list[int] = []
    for item in items:
        if isinstance(item, int):
            ids.append(item)
        else:
            ids += [special("<|open|>"), *TOKENIZER.encode_text(item), special("<|sep|>")]
    return ids or [0]


def _events(ids: Sequence[int], reason: str, stop: Sequence[str]) -> list[Event]:
    """As the engine has them for plain text; it ends at a stop string."""
    stream, events = TextStream(IncrementalDetokenizer(TOKENIZER, skip_special=True), stop), []
    for place, token in enumerate(ids):
        is_last = place == len(ids) - 1
        is_end = is_last and reason == "stop"
        text = "" if is_end else stream.push(token)
        if is_last or stream.is_stopped:
            text += stream.close()
        ends = "stop" if stream.is_stopped else (reason if is_last else None)
        events.append(Event(0, token, text, None, ends, is_end_token=is_end))  # type: ignore[arg-type]
        if ends:
            break
    return events


@settings(max_examples=150, deadline=None)
@given(
    st.lists(TOKENS, max_size=40),
    STOPS,
    st.sampled_from(["length", "stop"]),
    st.booleans(),
)
def test_chats(items: list[int | str], stop: list[str], reason: str, thinking: bool) -> None:
    parser = K3Parser(TOKENIZER, thinking=thinking, has_tools=True, stop=stop)
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    choice = ChatChoice(0, TOKENIZER, parser, (1,), "x", body)
    pieces = []
    for event in _events(_ids(items), reason, ()):
        piece = choice.feed(event)
        if piece is not None:
            pieces.append(json.loads(json.dumps(piece)))
        if choice.finish_reason is not None:
            break
    texts = {"reasoning": "", "reasoning_content": "", "content": ""}
    calls: list[list[str]] = []
    reasons = []
    for piece in pieces:
        for name in texts:
            texts[name] += piece["delta"].get(name) or ""
        for call in piece["delta"].get("tool_calls", []):
            if "id" in call:
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
        reasons += [piece["finish_reason"]] if piece["finish_reason"] else []
    whole = choice.whole()
    message = whole["message"]
    assert texts["content"] == (message["content"] or "")
    assert texts["reasoning"] == texts["reasoning_content"] == (message["reasoning"] or "")
    assert calls == [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", [])
    ]
    assert reasons == [whole["finish_reason"]]
    assert choice.num_reasoning_tokens <= choice.num_tokens
    assert not any(text in texts["content"] for text in stop)


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKENS, max_size=40), STOPS, st.sampled_from(["length", "stop"]), st.booleans())
def test_completions(items: list[int | str], stop: list[str], reason: str, echo: bool) -> None:
    prompt = TOKENIZER.encode_text("the 猫")
    body = CompletionRequest(prompt=prompt, echo=echo)
    choice = CompletionChoice(0, TOKENIZER, prompt, body)
    fed = [choice.feed(event) for event in _events(_ids(items), reason, stop)]
    pieces = [piece for piece in fed if piece is not None]
    whole = choice.whole()
    text = "".join(piece["text"] for piece in pieces)
    assert text == whole["text"]
    assert text.startswith("the 猫" if echo else "")
    reasons = [piece["finish_reason"] for piece in pieces if piece["finish_reason"]]
    assert reasons == [whole["finish_reason"]]
