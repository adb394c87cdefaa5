"""Loaded by schemathesis: bodies that the description allows are made such as the server runs.

A body with thirty random fields is refused for one of them, so most are thinned out to a few; the
others are sent as they were generated.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis

NEEDED = ("prompt", "messages", "tokens")
LENGTHS = ("max_tokens", "max_completion_tokens")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    # A choice that depends on the body alone, so that a failure can be replayed.
    choice = zlib.crc32(json.dumps(body, sort_keys=True, default=str).encode())
    if choice % 4 == 0:
        return body
    optional = sorted(name for name in body if name not in (*NEEDED, *LENGTHS))
    kept = {name for place, name in enumerate(optional) if (choice >> (place % 24)) % 8 == 0}
    thin = {name: value for name, value in body.items() if name in kept or name in NEEDED}
    if "messages" in thin and isinstance(thin["messages"], list):
        thin["messages"] = [_message(message) for message in thin["messages"][:4]]
    if any(name in thin for name in ("prompt", "messages")):
        thin["max_tokens"] = 1 + choice % 5
    return thin


def _message(message: Any) -> dict[str, Any]:
    """A user's: what other roles need seldom comes about by chance."""
    content = message.get("content") if isinstance(message, dict) else None
    return {"role": "user", "content": content[:100] if isinstance(content, str) else "x"}
