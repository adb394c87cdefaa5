"""Stop strings of chats: one meaning for `LLM.chat`, `kdecode generate --chat` and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replies import events, reply_ids, texts

from kdecode.engine.engine import LLM, ChatReply
from kdecode.engine.request import SamplingParams
from kdecode.server.parser import K3Parser

MESSAGE = {"reasoning": "five is the one", "content": "one two five six 😀 猫"}
USER = [{"role": "user", "content": "count"}]


@pytest.fixture(scope="module")
def llm(mini_checkpoint: Path) -> LLM:
    return LLM(
        mini_checkpoint, num_threads=1, page_tokens=16, max_context_tokens=512, max_requests=1
    )


def _chat(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, ids: list[int], thinking: bool, **settings: Any
) -> ChatReply:
    """A chat whose model says `ids`."""
    add = llm.add_request

    def scripted(prompt: Any, params: Any, **more: Any) -> int:
        return add(prompt, params, **{**more, "forced_ids": (*ids, *[5] * 64)})

    monkeypatch.setattr(llm, "add_request", scripted)
    shown: list[tuple[str, str]] = []
    params = SamplingParams(**settings)
    reply = llm.chat(USER, params, thinking=thinking, on_text=lambda *two: shown.append(two))
    monkeypatch.undo()
    together = tuple("".join(channel) for channel in zip(*shown, strict=True)) or ("", "")
    assert together == (reply.reasoning, reply.response)
    stats = llm.stats()
    assert [stats[name] for name in ("running", "pages_used", "slots_used")] == [0, 0, 0]
    return reply


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("stop", "response"),
    [
        (("five",), "one two "),
        (("e s",), "one two fiv"),
        (("😀",), "one two five six "),
        (("six", "o five"), "one tw"),
        (("one",), ""),
        (("seven",), MESSAGE["content"]),
        # A word of the markup, which is in the engine's text and in nobody's answer.
        (("response",), MESSAGE["content"]),
    ],
)
def test_a_stop_string_ends_the_response_and_is_not_shown(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    thinking: bool,
    stop: tuple[str, ...],
    response: str,
) -> None:
    message = MESSAGE if thinking else {"content": MESSAGE["content"]}
    ids = reply_ids(llm.tokenizer, message, thinking=thinking)
    reply = _chat(llm, monkeypatch, ids, thinking, stop=stop, max_tokens=200)
    assert (reply.reasoning, reply.response) == (message.get("reasoning", ""), response)
    assert reply.output.finish_reason == "stop"
    # Nothing is generated after the token that completed the stop string.
    assert list(reply.output.token_ids) == ids[: len(reply.output.token_ids)]
    is_cut = response != MESSAGE["content"]
    assert (len(reply.output.token_ids) < len(ids)) == is_cut


def test_the_server_reads_every_reply_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the reply is cut, and wherever stop strings may begin to act."""
    ids = reply_ids(llm.tokenizer, MESSAGE)
    for length in (1, len(ids) // 3, len(ids) - 19, len(ids) - 12, len(ids)):
        for min_tokens in (0, length - 8):
            settings = {"stop": ("five", "x 😀"), "min_tokens": max(0, min_tokens)}
            reply = _chat(llm, monkeypatch, ids, True, max_tokens=length, **settings)
            parser = K3Parser(llm.tokenizer, thinking=True, **settings)
            deltas, used = [], 0
            ended = "stop" if length == len(ids) else "length"
            for event in events(ids[:length], ended):
                used += 1
                deltas += parser.push(event)
                if parser.is_stopped:
                    break
            found = texts(deltas)
            assert (reply.reasoning, reply.response) == (found["reasoning"], found["content"])
            assert len(reply.output.token_ids) == used
            assert reply.output.finish_reason == ("stop" if parser.is_stopped else ended)


def test_a_stop_token_of_a_chat_is_no_part_of_its_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = llm.tokenizer.encode_text("ab")
    reply = _chat(llm, monkeypatch, ids, False, stop_token_ids=(ids[-1],), max_tokens=20)
    assert reply.response == llm.tokenizer.decode(ids[:-1])
    assert reply.output.finish_reason == "stop"
