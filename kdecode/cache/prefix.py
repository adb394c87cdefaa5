"""Prefixes of prompts that are in the caches already, for a model whose caches are of two kinds.

MLA rows can be shared page by page. A KDA state is one sum over all tokens, so that it serves a
prefix only where a copy was kept: on multiples of the state interval, which is a multiple of the
page size and of the prefill's alignment. A hit is the longest prefix that every kind serves. A
draft's rows are on the MLA pages and written in the same steps, so that they need no kind of their
own and cost no hit.

A page is named by all tokens up to its end, behind a salt of everything else that decides what is
written there, and a state by the name of the page that ends where it stands. Names are given after
a step has written what they stand for. Only what prefill computed is named: a state that grew token
by token differs in its last bits from the one that a chunk leaves, and a reply must not depend on
whether the prefix was found.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdecode.cache.caches import Caches
from kdecode.cache.shared_pages import SharedPages
from kdecode.cache.state_store import StateStore
from kdecode.config import ConfigError


@dataclass(frozen=True)
class Hit:
    """A prefix that can be taken over. paged_tokens: what the pages alone would have served."""

    num_tokens: int
    pages: tuple[int, ...]
    paged_tokens: int


@dataclass
class PrefixCounts:
    """Of requests that were admitted and may have hits. queries, hits, lost_to_state: in tokens;
    lost_to_state: of which the pages were there and the state was not."""

    requests: int = 0
    requests_with_hit: int = 0
    queries: int = 0
    hits: int = 0
    lost_to_state: int = 0


def state_interval(
    page_tokens: int, alignment: int, max_step_tokens: int, chosen: int | None = None
) -> int:
    """Tokens between two places where a state can be kept.

    By default as many as a step takes, so that keeping states cuts no chunk that is not cut anyhow.
    Raises ConfigError for a chosen number that pages or chunks do not divide.
    """
    unit = math.lcm(page_tokens, alignment)
    if chosen is None:
        return max(unit, max_step_tokens - max_step_tokens % unit)
    if chosen < 1 or chosen % unit:
        raise ConfigError(
            f"state_interval_tokens is {chosen}; it must be a multiple of {unit}, of the page size "
            f"({page_tokens} tokens) and of the prefill's alignment ({alignment})."
        )
    return chosen


def common_boundary(boundaries: Sequence[int], serves: Sequence[Callable[[int], bool]]) -> int:
    """The largest of ascending boundaries that every kind of cache serves; 0 if there is none."""
    for boundary in reversed(boundaries):
        if all(kind(boundary) for kind in serves):
            return boundary
    return 0


class PrefixCache:
    """What the scheduler asks before it runs a prompt, and tells after each step of one.

    block_tokens: the prefill's alignment, tokens of one chunk of the delta rule.
    """

    def __init__(
        self,
        caches: Caches,
        interval_tokens: int,
        num_states: int,
        salt: str = "",
        block_tokens: int = 1,
    ) -> None:
        if num_states < 1:
            raise ConfigError(
                f"The prefix cache has room for {num_states} states; it needs at least 1, because "
                "no prefix can be taken over without one."
            )
        self.interval_tokens = interval_tokens
        self.counts = PrefixCounts()
        self.states = StateStore(caches, num_states)
        self.pages = SharedPages(caches.page_pool, self.states.drop)
        self._page_tokens = caches.page_tokens
        self._block_tokens = block_tokens
        self._salt = salt

    def name_pages(self, names: list[bytes], ids: Sequence[int], salt: str) -> None:
        """Extends the names of a request's pages by those that its tokens fill now."""
        size = self._page_tokens
        for page in range(len(names), len(ids) // size):
            if page == 0:
                start = f"{len(self._salt)}:{self._salt}{salt}".encode(errors="surrogatepass")
                before = hashlib.sha256(start).digest()
            else:
                before = names[page - 1]
            content = array("q", ids[page * size : (page + 1) * size]).tobytes()
            names.append(hashlib.sha256(before + content).digest())

    def find(self, names: Sequence[bytes], num_tokens: int) -> Hit:
        """The prefix that a request of so many tokens would take over; changes nothing.

        The last token is computed always, because its logits are what comes next.
        """
        size = self._page_tokens
        pages: list[int] = []
        for name in names[: (num_tokens - 1) // size]:
            page = self.pages.find(name)
            if page is None:
                break
            pages.append(page)
        paged = len(pages) * size
        found = common_boundary(
            range(self.interval_tokens, num_tokens, self.interval_tokens),
            (
                lambda boundary: boundary <= paged,
                lambda boundary: names[boundary // size - 1] in self.states,
            ),
        )
        return Hit(found, tuple(pages[: found // size]), paged)

    def count(self, hit: Hit, num_tokens: int) -> None:
        """A request of so many tokens was admitted with a hit, which may be one of none."""
        counts = self.counts
        counts.requests += 1
        counts.requests_with_hit += hit.num_tokens > 0
        counts.queries += num_tokens
        counts.hits += hit.num_tokens
        counts.lost_to_state += hit.paged_tokens - hit.num_tokens

    def load_state(self, names: Sequence[bytes], hit: Hit, slot: int) -> None:
        """Gives a slot the state behind a hit of which the pages are held."""
        self.states.restore(names[hit.num_tokens // self._page_tokens - 1], slot)

    def publish(
        self, names: Sequence[bytes], pages: Sequence[int], span: tuple[int, int], slot: int
    ) -> None:
        """A prefill step has written the tokens [begin, end) of a request, and its slot is at end.

        Names the pages that are full now, and keeps the state where that is worth anything. Pages
        of an incomplete block at a prompt's end get no name: their rows may differ in the last bits
        from those of a complete one, which whoever keeps a state behind them has computed.
        """
        begin, end = span
        size, block = self._page_tokens, self._block_tokens
        for index in range((begin - begin % block) // size, (end - end % block) // size):
            self.pages.publish(pages[index], names[index])
        if end % self.interval_tokens == 0 and self.pages.find(names[end // size - 1]) is not None:
            self.states.save(names[end // size - 1], slot)

    def clear(self) -> None:
        """Forgets every prefix."""
        self.pages.clear()
        self.states.clear()
