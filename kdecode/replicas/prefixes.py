"""Names of what a request begins with: two requests have the names of their common beginning.

Owns what counts as the beginning of a request, and where the prefixes of it end. Knows neither the
tokenizer nor replicas: a name is a digest of bytes, of which four stand for a token, so that a
router needs no model. Who has which name is `affinity`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

BYTES_PER_TOKEN = 4
# Fields that say which requests belong together, the first that is there; `user` is none of them,
# because applications send one value for all that they do.
SESSION_FIELDS = ("prompt_cache_key", "session_id")
SESSION_HEADER = b"x-session-id"


def prefix_names(
    body: bytes, headers: Iterable[tuple[bytes, bytes]], first_bytes: int
) -> tuple[str, ...]:
    """The names of a request, from the shortest prefix to the longest.

    first_bytes: what the shortest prefix has. A session has a name too, the last one. A body that
    is no request has no names: whoever serves it will say what is wrong with it.
    """
    try:
        document = json.loads(body)
        return _names(document, headers, first_bytes) if isinstance(document, dict) else ()
    except (ValueError, RecursionError):
        return ()


def _names(
    document: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]], first_bytes: int
) -> tuple[str, ...]:
    salt = blake2b(_json(document.get("cache_salt")), digest_size=16).digest()
    names = list(_digests(_beginning(document), salt, first_bytes))
    session = _session(document, headers)
    if session is not None:
        key = b"session" + session.encode("utf-8", "surrogatepass")
        names.append(_name(blake2b(key, digest_size=16, key=salt)))
    return tuple(names)


def prefix_ends(first: int, size: int) -> Iterator[int]:
    """Where prefixes end: steps of `first` at the start, and of an eighth of the prefix later on.

    So that the longest body has some dozens of names, and a common beginning is known to an eighth.
    """
    end = first
    while end <= size:
        yield end
        end += max(first, end // 8)


def _digests(pieces: Iterable[bytes], salt: bytes, first: int) -> Iterator[str]:
    data = b"".join(pieces)
    digest = blake2b(digest_size=16, key=salt)
    done = 0
    for end in prefix_ends(first, len(data)):
        digest.update(data[done:end])
        done = end
        yield _name(digest)


def _name(digest: Any) -> str:
    name: str = digest.copy().hexdigest()
    return name


def _beginning(document: Mapping[str, Any]) -> Iterator[bytes]:
    """What the prompt is made of, in the order in which it stands in the prompt."""
    messages = document.get("messages")
    if isinstance(messages, list):
        yield _json(document.get("tools"))
        yield _json([document.get("reasoning_effort"), document.get("chat_template_kwargs")])
        yield from map(_json, messages)
        return
    prompt = document.get("prompt")
    # Several prompts of one request go the way of the first.
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt.encode("utf-8", "surrogatepass")
    elif isinstance(prompt, list):
        yield from map(_token, prompt)


def _token(number: Any) -> bytes:
    # What is no token id is refused by the replica, whatever its name.
    is_id = isinstance(number, int) and 0 <= number < 256**BYTES_PER_TOKEN
    return number.to_bytes(BYTES_PER_TOKEN, "little") if is_id else b""


def _session(document: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    for field in SESSION_FIELDS:
        value = document.get(field)
        if isinstance(value, str) and value:
            return value
    for name, value in headers:
        if name.lower() == SESSION_HEADER and value:
            return value.decode("latin-1")
    return None


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode("ascii")
