"""An access log as a Mooncake trace that has times, lengths and which beginnings are shared.

Owns what is taken over and what is not: no text, no token and no name leaves the log. A block's
number stands for everything up to its end, by a keyed hash whose key is thrown away.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from kdecode.bench.workloads.fields import MAX_NUMBER, MAX_TOKENS, parse_json
from kdecode.bench.workloads.files import MOONCAKE_BLOCK_TOKENS
from kdecode.bench.workloads.types import WorkloadError
from kdecode.config_json import shown

# Characters that stand for a block of 512 tokens where a log has texts and no tokens.
BLOCK_CHARACTERS = 4 * MOONCAKE_BLOCK_TOKENS
_TIMES = ("timestamp", "time", "created", "start_time")
_PROMPTS = ("prompt_tokens", "input_tokens", "input_length")
_REPLIES = ("completion_tokens", "output_tokens", "output_length")
_SESSIONS = ("session_id", "conversation_id", "user")


def import_log(lines: Iterator[str], key: bytes | None = None) -> Iterator[dict[str, Any]]:
    """Entries in the order of the log. key: of the hashes; a random one unless a test names it.

    A request whose prompt has no tokens was refused, and nobody can send it again: it is left out.
    A reply may have none. Raises WorkloadError, which names the line.
    """
    secret = key or secrets.token_bytes(32)
    numbers: dict[bytes, int] = {}
    sessions: dict[str, int] = {}
    first_ms: float | None = None
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        entry = _entry(line, number)
        time_ms = _time_ms(entry, number)
        first_ms = time_ms if first_ms is None else first_ms
        if time_ms < first_ms:
            raise WorkloadError(f"Line {number + 1}: it is older than the first line.")
        if _length(entry, _PROMPTS, number) == 0:
            continue
        found: dict[str, Any] = {
            "timestamp": round(time_ms - first_ms),
            "input_length": _length(entry, _PROMPTS, number),
            "output_length": _length(entry, _REPLIES, number),
        }
        blocks = [numbers.setdefault(name, len(numbers)) for name in _blocks(entry, number, secret)]
        most = -(-found["input_length"] // MOONCAKE_BLOCK_TOKENS)
        if blocks:
            found["hash_ids"] = blocks[:most]
        session = next((entry[name] for name in _SESSIONS if entry.get(name)), None)
        if session is not None:
            found["session_id"] = f"s{sessions.setdefault(str(session), len(sessions))}"
        yield found


def _entry(line: str, number: int) -> dict[str, Any]:
    """A line with the fields of its request, response and usage beside its own."""
    try:
        whole = parse_json(line)
    except ValueError as error:
        raise WorkloadError(f"Line {number + 1} is not JSON: {error}.") from None
    if not isinstance(whole, dict):
        raise WorkloadError(f"Line {number + 1} is no object.")
    merged = dict(whole)
    for name in ("request", "response", "usage"):
        inner = merged.get(name)
        if isinstance(inner, Mapping):
            merged = {**inner, **merged}
    return merged


def _time_ms(entry: Mapping[str, Any], number: int) -> float:
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp() * 1e3
            except ValueError:
                raise WorkloadError(f"Line {number + 1}: {name} is {value!r}, no time.") from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 <= value <= MAX_NUMBER:
                raise WorkloadError(f"Line {number + 1}: {name} is {shown(value)}, no time.")
            # Milliseconds since 1970 have 13 digits in this century, seconds 10.
            return float(value) if value > 1e11 else value * 1e3
    raise WorkloadError(f"Line {number + 1} has no time: one of {', '.join(_TIMES)}.")


def _length(entry: Mapping[str, Any], names: tuple[str, ...], number: int) -> int:
    for name in names:
        value = entry.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value <= MAX_TOKENS:
                raise WorkloadError(
                    f"Line {number + 1}: {name} is {shown(value)}; from 0 to {MAX_TOKENS:,}."
                )
            return value
    raise WorkloadError(f"Line {number + 1} has no length: one of {', '.join(names)}.")


def _blocks(entry: Mapping[str, Any], number: int, secret: bytes) -> Iterator[bytes]:
    """A name for each block of the prompt and everything before it; none without a prompt."""
    ids = entry.get("prompt_token_ids")
    if isinstance(ids, list):
        size = 4 * MOONCAKE_BLOCK_TOKENS
        try:
            pieces = struct.pack(f"<{len(ids)}I", *ids)
        except struct.error:
            raise WorkloadError(
                f"Line {number + 1}: prompt_token_ids has a value that is no token id."
            ) from None
    else:
        content = entry.get("messages") or entry.get("prompt")
        if not content:
            return
        text = content if isinstance(content, str) else json.dumps(content)
        size, pieces = BLOCK_CHARACTERS, text.encode(errors="surrogatepass")
    chain = secret
    for begin in range(0, len(pieces), size):
        chain = hashlib.blake2b(chain + pieces[begin : begin + size], key=secret).digest()
        yield chain
