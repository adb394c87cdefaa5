"""Workloads from files that others wrote: Mooncake JSONL, Weka (AgentX) traces, chats.

Owns the formats. Lengths, times and block hashes are a trace's; its contents are made from the
hashes by `synthetic`, so that equal blocks have equal tokens and nothing else is shared. What a
format has and is not served is refused or named here, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kdecode.bench.workloads.fields import number_of, objects_of, parse_json, values_of, whole_of
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
        text = read_regular(path, WorkloadError, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is no text in UTF-8: {error}") from error
    try:
        whole = parse_json(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        found = list(_lines(path, text))
    for number, entry in enumerate(found):
        if not isinstance(entry, Mapping):
            raise WorkloadError(f"{path}, entry {number + 1}: it is no object.")
        yield entry


def _lines(path: Path, text: str) -> Iterator[Any]:
    # Not splitlines: a text in JSON may contain other ends of lines, U+2028 for instance.
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:
                raise WorkloadError(f"{path}, line {number + 1} is not JSON: {error}.") from None


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
    first_ms = min((number_of(e, "timestamp", _entry(n)) for n, e in enumerate(entries)))
    for number, entry in enumerate(entries):
        session = str(entry.get("session_id", ""))
        turn = turns.get(session, 0) if session else 0
        turns[session] = turn + 1
        content: dict[str, Any] = {}
        where = _entry(number)
        if entry.get("messages"):
            content = {
                "messages": objects_of(entry, "messages", where),
                "tools": objects_of(entry, "tools", where) or None,
            }
        elif entry.get("text_input"):
            content = {"prompt": str(entry["text_input"])}
        elif "payload" in entry:
            raise WorkloadError(f"{where} has a payload, which is not replayed.")
        else:
            length = whole_of(entry, "input_length", where)
            hashes = values_of(entry, "hash_ids", where) or (f"own/{number}",)
            blocks = [f"mooncake/{block}" for block in hashes]
            content = {
                "prompt_ids": prompt_of_blocks(
                    settings.seed, blocks, settings.tokens, length, MOONCAKE_BLOCK_TOKENS
                )
            }
        yield Request(
            f"m{number}",
            # Nobody can ask for no token; the prompt is part of the load all the same.
            max(1, whole_of(entry, "output_length", where)),
            session=session,
            turn=turn,
            at_s=(number_of(entry, "timestamp", where) - first_ms) / 1e3 if turn == 0 else None,
            delay_s=_pause(number_of(entry, "delay", where) / 1e3 if turn else 0.0, settings),
            **content,
        )


def _weka(entries: Sequence[Mapping[str, Any]], settings: ReadSettings) -> Iterator[Request]:
    """Times are seconds. A subagent's requests are played in its parent's lane, in their order."""
    for place, trace in enumerate(entries):
        name = str(trace.get("id", place))
        size = whole_of(trace, "block_size", f"Trace {name}", least=1)
        scope = trace.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise WorkloadError(f"Trace {name}: hash_id_scope is {scope!r}; local or global.")
        own = f"weka/{name}" if scope == "local" else "weka"
        before_end = 0.0
        for turn, request in enumerate(_leaves(trace, f"Trace {name}")):
            where = f"Trace {name}, request {turn + 1}"
            at_s = number_of(request, "t", where)
            blocks = [f"{own}/{block}" for block in values_of(request, "hash_ids", where)]
            rest = blocks or [f"{own}/own/{turn}"]
            length = whole_of(request, "in", where)
            yield Request(
                f"w{place}t{turn}",
                max(1, whole_of(request, "out", where)),
                prompt_ids=prompt_of_blocks(settings.seed, rest, settings.tokens, length, size),
                session=f"w{place}",
                turn=turn,
                at_s=0.0 if turn == 0 else None,
                delay_s=_pause(max(0.0, at_s - before_end) if turn else 0.0, settings),
            )
            before_end = at_s + number_of(request, "api_time", where)


def _leaves(trace: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for request in objects_of(trace, "requests", where):
        if request.get("type") == "subagent":
            found += _leaves(request, f"{where}, subagent")
        else:
            found.append(request)
    return sorted(found, key=lambda request: number_of(request, "t", where))


def _chat(entries: Sequence[Mapping[str, Any]], settings: ReadSettings) -> Iterator[Request]:
    """A conversation an entry: each of its assistants' messages is a reply, and what is before it
    a turn; one that ends with a user's message has its last turn there."""
    for number, entry in enumerate(entries):
        where = _entry(number)
        messages = objects_of(entry, "messages", where)
        if not messages:
            raise WorkloadError(f"{where} has no messages.")
        ends = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i]
        if messages[-1].get("role") != "assistant":
            ends.append(len(messages))
        limit = settings.max_tokens
        if entry.get("max_tokens") is not None:
            limit = whole_of(entry, "max_tokens", where)
        for turn, end in enumerate(ends):
            yield Request(
                f"c{number}t{turn}",
                limit,
                messages=messages[:end],
                tools=objects_of(entry, "tools", where) or None,
                session=f"c{number}",
                turn=turn,
                at_s=number_of(entry, "timestamp", where) / 1e3 if turn == 0 else None,
                delay_s=_pause(number_of(entry, "delay", where) / 1e3 if turn else 0.0, settings),
            )


def _entry(place: int) -> str:
    return f"Entry {place + 1}"


def _pause(seconds: float, settings: ReadSettings) -> float:
    return seconds if settings.max_pause_s is None else min(seconds, settings.max_pause_s)
