"""One step's metadata: which tokens of which requests run, and where their caches are.

A step is a set of requests, each with one or more new tokens. Whether a request is in its decode
phase is said by its state (`is_decode`), never derived from token counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRequest:
    """One request's share of a step.

    token_ids: the new tokens. start: tokens already in the caches, i.e. the position of the first
    new token. slot: KDA slot. pages: MLA page numbers, enough for start + len(token_ids) tokens.
    needs_logits: logits of the last new token are wanted. is_decode: the prompt has been prefilled.
    all_logits: of every new token, not only the last one; only with needs_logits.
    is_verify: all tokens but the first are drafts, and how many of them stay is not known yet. The
    KDA slot stays as it is until `Caches.commit` says it; cache rows are written.
    is_resumed: the first step of a slot whose tokens before ``start`` another request computed; all
    caches have them.
    """

    token_ids: tuple[int, ...]
    start: int
    slot: int
    pages: tuple[int, ...]
    is_decode: bool
    needs_logits: bool = True
    all_logits: bool = False
    is_verify: bool = False
    is_resumed: bool = False

    @property
    def num_logits(self) -> int:
        """Rows of logits that it gets."""
        if not self.needs_logits:
            return 0
        return len(self.token_ids) if self.all_logits else 1


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, in row order."""

    requests: tuple[StepRequest, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)
