"""Chat conversations as token ids, in the markup that the model was trained on.

Owns: K3's XTML markup (the released encoder's pieces, order and wording), Kimi-Linear's older
template, and splitting a reply into reasoning and answer. Does not know sampling or HTTP.

A prompt is a list of pieces that are encoded one by one. Only marker pieces become special ids; tag
names, attributes and every user-supplied text are plain text, so a message that contains
`<|open|>` cannot open anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kdecode.config_json import shown
from kdecode.model.tokenizer import IncrementalDetokenizer, Tokenizer

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
K3_MARKERS = (OPEN, CLOSE, SEP, END_OF_MSG)

IM_MIDDLE = "<|im_middle|>"
IM_END = "<|im_end|>"
IM_ROLES = {
    "system": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
}
KIMI_LINEAR_MARKERS = (*IM_ROLES.values(), IM_MIDDLE, IM_END)

# The instruction text also names `medium`, but the released encoder refuses it.
EFFORTS = ("low", "high", "max")

# A message or a tool as clients send it: decoded JSON, checked where it is used.
JsonObject = Mapping[str, Any]
ChatFormat = Literal["kimi_k3", "kimi_linear"]


class ChatError(ValueError):
    """A conversation that has no encoding; the message names the place and the value."""


@dataclass(frozen=True)
class Piece:
    """One separately encoded part of a prompt; a marker is one special id."""

    text: str
    is_marker: bool = False


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The markup whose markers the tokenizer has."""
    if all(name in tokenizer.special_ids for name in K3_MARKERS):
        return "kimi_k3"
    if all(name in tokenizer.special_ids for name in KIMI_LINEAR_MARKERS):
        return "kimi_linear"
    raise ChatError(
        f"This tokenizer has neither all of K3's chat markers {K3_MARKERS} nor all of "
        f"Kimi-Linear's {KIMI_LINEAR_MARKERS}; chat prompts cannot be encoded."
    )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject] | None = None,
    thinking: bool = True,
    effort: str = "max",
) -> list[int]:
    """Prompt ids, up to and including the opening of the assistant's reply.

    `thinking` and `effort` act for K3 only: Kimi-Linear has no thinking channel. No [BOS] is added.
    """
    if chat_format(tokenizer) == "kimi_k3":
        pieces = render_k3(messages, tools, thinking, effort)
    else:
        pieces = _render_kimi_linear(messages, tools)
    return _encode(tokenizer, pieces)


def end_of_reasoning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What leads from the inside of K3's think channel to that of the response."""
    close = _element("think", [], [])[len(_open("think")) :]
    return tuple(_encode(tokenizer, [*close, *_open("response")]))


def _encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        if piece.is_marker:
            ids.append(tokenizer.special_id(piece.text))
        else:
            ids.extend(tokenizer.encode_text(piece.text))
    return ids


def render_k3(
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject] | None = None,
    thinking: bool = True,
    effort: str = "max",
) -> list[Piece]:
    """The pieces of a K3 prompt: tools, thinking effort, conversation, generation prompt."""
    if effort not in EFFORTS:
        raise ChatError(
            f"The thinking effort is {shown(effort)}; it must be {', '.join(EFFORTS[:-1])} or "
            f"{EFFORTS[-1]}. The released encoder takes no other, although the prompt that it "
            "writes lists medium as well."
        )
    pieces: list[Piece] = []
    if tools:
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise ChatError(f"tools must be a list of objects, not {tools!r}.")
        declared = json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        body = (
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
            f"```json\n{declared}\n```"
        )
        pieces += _message([("role", "system"), ("type", "tool-declare")], _text(body))
    if thinking:
        body = (
            "`thinking_effort` guides on how much to think in your thinking channel (not "
            "including the response channel), supported values include `low`, `medium`, `high`, "
            f"and `max`.\nNow the system is invoked with `thinking_effort={effort}`."
        )
        pieces += _message([("role", "system"), ("type", "thinking-effort")], _text(body))
    pieces += _conversation(messages, thinking)
    pieces += _open("message", [("role", "assistant")])
    pieces += _open("think" if thinking else "response")
    return pieces


class ReplyStream:
    """The two texts of a generated reply as its tokens come, found by token id, never by text.

    The reply starts inside the channel that the prompt opened. A reply cut short anywhere is split
    the same way; the tools channel is in neither text, and no special token is in any.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool = True) -> None:
        self._tokenizer = tokenizer
        is_k3 = chat_format(tokenizer) == "kimi_k3"
        names = K3_MARKERS if is_k3 else (IM_END,)
        # Kimi-Linear has no tags, only an end.
        *self._tag_ids, self._end_id = (tokenizer.special_id(name) for name in names)
        self._channel = "think" if thinking and is_k3 else "response"
        self._texts = {
            name: IncrementalDetokenizer(tokenizer, skip_special=True)
            for name in ("think", "response")
        }
        self._tag: list[int] | None = None
        self._is_ended = False

    def push(self, token_id: int) -> tuple[str, str]:
        """What became readable with this token: (reasoning, response)."""
        self._is_ended = self._is_ended or token_id == self._end_id
        if self._is_ended or self._is_markup(token_id) or self._channel not in self._texts:
            return "", ""
        text = self._texts[self._channel].push(token_id)
        return (text, "") if self._channel == "think" else ("", text)

    def flush(self) -> tuple[str, str]:
        """The rest of both texts, at the end of the reply."""
        return self._texts["think"].flush(), self._texts["response"].flush()

    def _is_markup(self, token_id: int) -> bool:
        """Follows tags, from their opener to their end; their inside is markup too."""
        if not self._tag_ids:
            return False
        open_id, close_id, sep_id = self._tag_ids
        if token_id in (open_id, close_id):
            self._tag = [token_id]
        elif self._tag is None:
            return False
        elif token_id != sep_id:
            self._tag.append(token_id)
        else:
            name = self._tokenizer.decode(self._tag[1:], skip_special=True).split(" ")[0]
            if self._tag[0] == open_id:
                self._channel = name
            elif name == self._channel:
                self._channel = ""
            self._tag = None
        return True


def split_reply(tokenizer: Tokenizer, ids: Iterable[int], thinking: bool = True) -> tuple[str, str]:
    """(reasoning, response) of a whole reply, as `ReplyStream` finds them."""
    stream = ReplyStream(tokenizer, thinking)
    pieces = [*(stream.push(token_id) for token_id in ids), stream.flush()]
    reasoning, response = zip(*pieces, strict=True)
    return "".join(reasoning), "".join(response)


def _conversation(messages: Sequence[JsonObject], thinking: bool) -> list[Piece]:
    pieces: list[Piece] = []
    calls: Sequence[JsonObject] = ()
    tool_index = 0
    for position, message in _in_call_order(messages):
        where = f"messages[{position}]"
        role = message["role"]
        attributes = [("role", role)]
        if role == "tool":
            tool_index += 1
            name = _tool_name(message, calls, tool_index, where)
            attributes += [("tool", name), ("index", str(tool_index))]
        elif message.get("name"):
            attributes.append(("name", str(message["name"])))
        if role == "assistant":
            calls, tool_index = _tool_calls(message, where), 0
            body = _assistant_body(message, calls, thinking, where)
        else:
            if message.get("tools"):
                raise ChatError(f"{where}: tools declared inside a message are not supported.")
            body = _text(_content(message, where))
        pieces += _message(attributes, body)
    return pieces


def _in_call_order(messages: Sequence[JsonObject]) -> list[tuple[int, JsonObject]]:
    """Messages with their positions; a run of tool results is put in the order of the calls.

    A run is reordered only when every result in it names a call of the last assistant message.
    """
    ordered: list[tuple[int, JsonObject]] = []
    run: list[tuple[int, JsonObject]] = []
    call_order: dict[str, int] = {}
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("system", "user", "assistant", "tool"):
            raise ChatError(
                f"{where} must be an object with a role of system, user, assistant or tool; its "
                f"role is {role!r}."
            )
        if role == "tool":
            run.append((position, message))
            continue
        ordered += _sorted_run(run, call_order)
        run = []
        ordered.append((position, message))
        if role == "assistant":
            call_order = {}
            for index, call in enumerate(_tool_calls(message, where)):
                if call.get("id") is not None:
                    call_order.setdefault(str(call["id"]), index)
    return ordered + _sorted_run(run, call_order)


def _sorted_run(
    run: list[tuple[int, JsonObject]], call_order: Mapping[str, int]
) -> list[tuple[int, JsonObject]]:
    keys = [message.get("tool_call_id") for _, message in run]
    if not all(key is not None and str(key) in call_order for key in keys):
        return run
    return sorted(run, key=lambda item: call_order[str(item[1]["tool_call_id"])])


def _tool_name(
    message: JsonObject, calls: Sequence[JsonObject], tool_index: int, where: str
) -> str:
    """The called function: by call id, else as the message says, else by order."""
    call_id = message.get("tool_call_id")
    by_id = [call for call in calls if call_id is not None and str(call.get("id")) == str(call_id)]
    if by_id:
        return str(_function(by_id[0], where)["name"])
    name = message.get("tool") or message.get("name")
    if name:
        return str(name)
    if tool_index <= len(calls):
        return str(_function(calls[tool_index - 1], where)["name"])
    raise ChatError(
        f"{where} is a tool result that answers no call: its tool_call_id is {call_id!r}, it has "
        f"no 'name', and the last assistant message made {len(calls)} calls."
    )


def _tool_calls(message: JsonObject, where: str) -> Sequence[JsonObject]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise ChatError(f"{where}.tool_calls must be a list of objects, not {calls!r}.")
    return calls


def _function(call: JsonObject, where: str) -> JsonObject:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where}: the tool call {call!r} names no function.")
    return function


def _assistant_body(
    message: JsonObject, calls: Sequence[JsonObject], thinking: bool, where: str
) -> list[Piece]:
    pieces: list[Piece] = []
    if thinking:
        # The think channel is part of the structure: present even when there is no reasoning.
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise ChatError(f"{where}: the reasoning must be text, not {reasoning!r}.")
        pieces += _element("think", [], _text(reasoning if reasoning.strip() else ""))
    pieces += _element("response", [], _text(_content(message, where)))
    if calls:
        body: list[Piece] = []
        for index, call in enumerate(calls, start=1):
            function = _function(call, where)
            attributes = [("tool", function["name"]), ("index", str(index))]
            arguments = _arguments(function.get("arguments"), where)
            body += _element("call", attributes, arguments)
        pieces += _element("tools", [], body)
    return pieces


def _arguments(arguments: object, where: str) -> list[Piece]:
    """One typed element an argument; text that is not JSON is passed on whole."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError:
            return _element("json", [("type", "object")], _text(arguments))
        arguments = parsed
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ChatError(f"{where}: tool call arguments must be an object, not {arguments!r}.")
    pieces: list[Piece] = []
    for key, value in arguments.items():
        body = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        pieces += _element("argument", [("key", key), ("type", _json_type(value))], _text(body))
    return pieces


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int | float, "number"), (str, "string"), (Mapping, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "array")


def _content(message: JsonObject, where: str) -> str:
    """Text of a message's content: text, null, or a list of text parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ChatError(f"{where}.content must be text or a list of parts, not {content!r}.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatError(
                f"{where}.content has a part of type {kind!r}; only parts of type 'text' with a "
                f"'text' are supported."
            )
        texts.append(part["text"])
    return "".join(texts)


def _text(text: str) -> list[Piece]:
    return [Piece(text)] if text else []


def _open(name: str, attributes: Sequence[tuple[str, str]] = ()) -> list[Piece]:
    pieces = [Piece(OPEN, is_marker=True), Piece(name)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        pieces += [Piece(f" {key}"), Piece('="'), *_text(escaped), Piece('"')]
    return [*pieces, Piece(SEP, is_marker=True)]


def _element(name: str, attributes: Sequence[tuple[str, str]], body: list[Piece]) -> list[Piece]:
    close = [Piece(CLOSE, is_marker=True), Piece(name), Piece(SEP, is_marker=True)]
    return [*_open(name, attributes), *body, *close]


def _message(attributes: Sequence[tuple[str, str]], body: list[Piece]) -> list[Piece]:
    return [*_element("message", attributes, body), Piece(END_OF_MSG, is_marker=True)]


def _render_kimi_linear(
    messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None
) -> list[Piece]:
    """`<|im_ROLE|>ROLE<|im_middle|>content<|im_end|>` a message, then the assistant's opening.

    Inferred from other models of the same family; the released template was not available.
    """
    if tools:
        raise ChatError("Tools are not supported with Kimi-Linear's chat template.")
    pieces: list[Piece] = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in IM_ROLES:
            raise ChatError(f"{where} has the role {role!r}; it must be one of {list(IM_ROLES)}.")
        pieces += _im_header(role) + _text(_content(message, where)) + [Piece(IM_END, True)]
    return pieces + _im_header("assistant")


def _im_header(role: str) -> list[Piece]:
    return [Piece(IM_ROLES[role], is_marker=True), Piece(role), Piece(IM_MIDDLE, is_marker=True)]
