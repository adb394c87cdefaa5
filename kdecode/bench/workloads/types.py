"""Requests and workloads, whatever they were read from.

Owns what a request has and the digest of a workload. Does not know servers or file formats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# recorded: the turns of a session are those of the workload, whatever a server answers, so that two
# servers get the same prompts. live: a server's own replies take the place of the recorded ones.
ReplyMode = Literal["recorded", "live"]


class WorkloadError(ValueError):
    """A workload that cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Request:
    """One request; exactly one of prompt_ids, prompt and messages is given.

    session, turn: turns of one session follow each other. at_s: when the session should begin, from
    the workload's beginning; only of its first turn. delay_s: pause before the turn, after the one
    before has ended.
    """

    id: str
    max_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    session: str = ""
    turn: int = 0
    at_s: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        given = [self.prompt_ids, self.prompt, self.messages]
        if sum(value is not None for value in given) != 1 or not any(given):
            raise WorkloadError(
                f"Request {self.id} needs one of token ids, a text and messages, and not empty."
            )
        if self.max_tokens < 1:
            raise WorkloadError(f"Request {self.id} asks for {self.max_tokens} tokens; 1 or more.")
        if self.delay_s < 0 or (self.at_s or 0) < 0:
            raise WorkloadError(f"Request {self.id} has a time below 0.")


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which their sessions begin. name: where they are from."""

    name: str
    requests: tuple[Request, ...]
    reply_mode: ReplyMode = "recorded"

    def __post_init__(self) -> None:
        if not self.requests:
            raise WorkloadError(f"The workload {self.name} has no requests.")
        ids = {request.id for request in self.requests}
        if len(ids) != len(self.requests):
            raise WorkloadError(f"The workload {self.name} has two requests of one id.")
        if self.reply_mode == "live" and any(r.messages is None for r in self.requests):
            raise WorkloadError(
                f"The workload {self.name} has requests without messages; live replies can only "
                "follow messages."
            )

    @property
    def digest(self) -> str:
        """The same for the same requests, on every machine."""
        fields = [dataclasses.asdict(request) for request in self.requests]
        text = json.dumps([self.reply_mode, fields], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def sessions(self) -> list[tuple[Request, ...]]:
        """Requests by session; one without a session is its own."""
        found: dict[str, list[Request]] = {}
        for request in self.requests:
            found.setdefault(request.session or f"\0{request.id}", []).append(request)
        return [tuple(sorted(turns, key=lambda request: request.turn)) for turns in found.values()]


def following_messages(
    history: Sequence[Mapping[str, Any]],
    before: Request,
    request: Request,
    reply: str,
) -> tuple[Mapping[str, Any], ...]:
    """A turn's messages with a live reply in the place of the recorded one.

    history: what was sent for the turn before, `before`.
    """
    assert before.messages is not None
    assert request.messages is not None
    new = request.messages[len(before.messages) :]
    kept = [message for message in new if message.get("role") != "assistant"]
    return (*history, {"role": "assistant", "content": reply}, *kept)
