"""K3 replies as token ids, and what parsers made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdecode.engine.loop import Event
from kdecode.model.chat import END_OF_MSG, Piece, render_k3
from kdecode.model.tokenizer import Tokenizer
from kdecode.server.parser import Delta, ReplyParser

USER = {"role": "user", "content": "Hi"}


def k3_tokenizer() -> Tokenizer:
    """Bytes and a few merges that split characters, so that text comes in odd pieces."""
    names = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|other|>"]
    names += [f"reserved {i}" for i in range(256 - len(names))]
    merges = [b"th", b"in", b"\xe7\x8c", b"\xf0\x9f", b"<|", b"|>"]
    return Tokenizer([bytes([byte]) for byte in range(256)] + merges, names)


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        if piece.is_marker:
            ids.append(tokenizer.special_id(piece.text))
        else:
            ids += tokenizer.encode_text(piece.text)
    return ids


def reply_ids(
    tokenizer: Tokenizer, message: Mapping[str, Any], *, thinking: bool = True
) -> list[int]:
    """What a model says for this message: its part of the encoded conversation."""
    opening = render_k3([USER], thinking=thinking)
    whole = render_k3([USER, {"role": "assistant", **message}], thinking=thinking)
    assert whole[: len(opening)] == opening
    end = max(i for i, piece in enumerate(whole) if piece == Piece(END_OF_MSG, is_marker=True))
    return encode(tokenizer, whole[len(opening) : end + 1])


def events(ids: Sequence[int], finish_reason: str = "length") -> list[Event]:
    last = len(ids) - 1
    return [
        Event(
            0,
            token,
            "",
            None,
            finish_reason if i == last else None,  # type: ignore[arg-type]
            is_end_token=i == last and finish_reason == "stop",
        )
        for i, token in enumerate(ids)
    ]


def parse(parser: ReplyParser, ids: Sequence[int], finish_reason: str = "length") -> list[Delta]:
    return [delta for event in events(ids, finish_reason) for delta in parser.push(event)]


def texts(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The deltas of one reply put together."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for delta in deltas:
        if delta.kind == "tool_name":
            found["calls"].append([delta.text, ""])
        elif delta.kind == "tool_arguments":
            found["calls"][delta.call][1] += delta.text
        else:
            found[delta.kind] += delta.text
    return found
