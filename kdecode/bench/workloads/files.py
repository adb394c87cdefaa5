"""Workloads from files that others wrote: Mooncake JSONL, Weka (AgentX) traces, chats.

Owns the formats. Lengths, times and block hashes are a trace's; its contents are made from the
hashes by `synthetic`, so that equal blocks have equal tokens and nothing else is shared. What a
format has and is not served is refused or named here, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kdecode.bench.workloads.synthetic import TokenRange, prompt_of_blocks
from kdecode.bench.workloads.types import ReplyMode, Request, Workload, WorkloadError
from kdecode.config_json import read_regular

Format = Literal["mooncake", "weka", "chat"]
MOONCAKE_BLOCK_TOKENS = 512
MAX_FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class ReadSettings:
    """How a file becomes requests.

    tokens, seed: of made prompts. sessions: take the first ones only. max_pause_s: longer pauses
    inside of a session are cut to this. reply_mode: of chats. max_tokens: of chats that name none.
    """

    tokens: TokenRange
    seed: int = 0
    sessions: int | None = None
    max_pause_s: float | None = None
    reply_mode: ReplyMode = "recorded"
    max_tokens: int = 256


def read_workload(path: Path, settings: ReadSettings, fmt: Format | None = None) -> Workload:
    """Raises WorkloadError, which names the entry."""
    entries = list(_entries(path))
    if not entries:
        raise WorkloadError(f"{path} has no entries.")
    found = fmt or _guess(path, entries[0])
    readers = {"mooncake": _mooncake, "weka": _weka, "chat": _chat}
    requests = list(readers[found](entries, settings))
    if settings.sessions is not None:
        whole = Workload(path.name, tuple(requests)).sessions()[: settings.sessions]
        requests = [request for turns in whole for request in turns]
    name = f"{found} {path.name}"
    return Workload(name, tuple(requests), settings.reply_mode)


def _entries(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON or JSON-lines file, or of all JSON files of a folder."""
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield from _entries(file)
        return
    try:
        text = read_regular(path, WorkloadError, MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is no text in UTF-8: {error}") from error
    try:
        whole = json.loads(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        found = list(_lines(path, text))
    for number, entry in enumerate(found):
        if not isinstance(entry, Mapping):
            raise WorkloadError(f"{path}, entry {number + 1}: it is no object.")
        yield entry


def _lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines()):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                raise WorkloadError(f"{path}, line {number + 1}: it is not JSON.") from None


def _guess(path: Path, entry: Mapping[str, Any]) -> Format:
    if "requests" in entry:
        return "weka"
    if "input_length" in entry or "hash_ids" in entry or "text_input" in entry:
        return "mooncake"
    if "messages" in entry:
        return "chat"
    raise WorkloadError(
        f"{path} is in none of the formats {', '.join(get_args(Format))}: its first entry has "
        f"{', '.join(map(str, entry))}."
    )


def _mooncake(entries: Sequence[Mapping[str, Any]], settings: ReadSettings) -> Iterator[Request]:
    """`timestamp` and `delay` are milliseconds; a `session_id` makes turns of its entries."""
    turns: dict[str, int] = {}
    first_ms = min((_number(e, "timestamp", n) for n, e in enumerate(entries)), default=0.0)
    for number, entry in enumerate(entries):
        session = str(entry.get("session_id", ""))
        turn = turns.get(session, 0) if session else 0
        turns[session] = turn + 1
        content: dict[str, Any] = {}
        if entry.get("messages"):
            content = {"messages": tuple(entry["messages"]), "tools": _tools(entry)}
        elif entry.get("text_input"):
            content = {"prompt": str(entry["text_input"])}
        elif "payload" in entry:
            raise WorkloadError(f"Entry {number + 1} has a payload, which is not replayed.")
        else:
            length = _whole(entry, "input_length", number)
            blocks = [f"mooncake/{block}" for block in entry.get("hash_ids") or (f"own/{number}",)]
            content = {
                "prompt_ids": prompt_of_blocks(
                    settings.seed, blocks, settings.tokens, length, MOONCAKE_BLOCK_TOKENS
                )
            }
        yield Request(
            f"m{number}",
            _whole(entry, "output_length", number),
            session=session,
            turn=turn,
            at_s=(_number(entry, "timestamp", number) - first_ms) / 1e3 if turn == 0 else None,
            delay_s=_pause(_number(entry, "delay", number) / 1e3 if turn else 0.0, settings),
            **content,
        )


def _weka(entries: Sequence[Mapping[str, Any]], settings: ReadSettings) -> Iterator[Request]:
    """Times are seconds. A subagent's requests are played in its parent's lane, in their order."""
    for place, trace in enumerate(entries):
        name = str(trace.get("id", place))
        size = _whole(trace, "block_size", place)
        scope = trace.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise WorkloadError(f"Trace {name}: hash_id_scope is {scope!r}; local or global.")
        own = f"weka/{name}" if scope == "local" else "weka"
        before_end = 0.0
        for turn, request in enumerate(_leaves(trace.get("requests") or ())):
            at_s = _number(request, "t", turn)
            blocks = [f"{own}/{block}" for block in request.get("hash_ids") or ()]
            rest = blocks or [f"{own}/own/{turn}"]
            length = _whole(request, "in", turn)
            yield Request(
                f"w{place}t{turn}",
                max(1, _whole(request, "out", turn)),
                prompt_ids=prompt_of_blocks(settings.seed, rest, settings.tokens, length, size),
                session=f"w{place}",
                turn=turn,
                at_s=0.0 if turn == 0 else None,
                delay_s=_pause(max(0.0, at_s - before_end) if turn else 0.0, settings),
            )
            before_end = at_s + _number(request, "api_time", turn)


def _leaves(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for request in requests:
        if request.get("type") == "subagent":
            found += _leaves(request.get("requests") or ())
        else:
            found.append(request)
    return sorted(found, key=lambda request: float(request.get("t") or 0.0))


def _chat(entries: Sequence[Mapping[str, Any]], settings: ReadSettings) -> Iterator[Request]:
    """A conversation an entry: each of its assistants' messages is a reply, and what is before it
    a turn; one that ends with a user's message has its last turn there."""
    for number, entry in enumerate(entries):
        messages = entry.get("messages")
        if not isinstance(messages, list) or not messages:
            raise WorkloadError(f"Entry {number + 1} has no messages.")
        ends = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i]
        if messages[-1].get("role") != "assistant":
            ends.append(len(messages))
        limit = entry.get("max_tokens", settings.max_tokens)
        for turn, end in enumerate(ends):
            yield Request(
                f"c{number}t{turn}",
                int(limit),
                messages=tuple(messages[:end]),
                tools=_tools(entry),
                session=f"c{number}",
                turn=turn,
                at_s=_number(entry, "timestamp", number) / 1e3 if turn == 0 else None,
                delay_s=_pause(_number(entry, "delay", number) / 1e3 if turn else 0.0, settings),
            )


def _tools(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    return tuple(entry["tools"]) if entry.get("tools") else None


def _pause(seconds: float, settings: ReadSettings) -> float:
    return seconds if settings.max_pause_s is None else min(seconds, settings.max_pause_s)


def _number(entry: Mapping[str, Any], name: str, place: int) -> float:
    value = entry.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise WorkloadError(f"Entry {place + 1}: {name} is {value!r}; a number from 0 on.")
    return float(value)


def _whole(entry: Mapping[str, Any], name: str, place: int) -> int:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WorkloadError(f"Entry {place + 1}: {name} is {value!r}; a whole number from 0 on.")
    return value
