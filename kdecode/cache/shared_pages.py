"""MLA pages that several requests may hold, and that are kept for later ones while there is room.

Owns who holds a page and what a page is known to contain. A page gets a name once it is full and
written; from then on it is only read, so nothing ever has to be copied before a write. A named page
that nobody holds is idle: found again by its name, or given to whoever needs a page, longest idle
first. Does not know tokens: a name stands for the content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kdecode.cache.pool import IndexPool, PoolError, PoolExhaustedError


class SharedPages:
    """Has the three methods that the scheduler needs of a pool. forget: told of names that are
    lost, because their page is given away."""

    def __init__(self, pool: IndexPool, forget: Callable[[bytes], None]) -> None:
        self._pool = pool
        self._forget = forget
        self._holders: Counter[int] = Counter()
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # Ordered: the first one has been idle for longest.
        self._idle: dict[int, None] = {}
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give, idle ones included."""
        return self._pool.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_named(self) -> int:
        return len(self._page_of)

    def find(self, name: bytes) -> int | None:
        return self._page_of.get(name)

    def count_idle(self, pages: Iterable[int]) -> int:
        return sum(page in self._idle for page in pages)

    def allocate(self, count: int = 1) -> tuple[int, ...]:
        """Free pages for one holder; idle ones lose their content. Takes none where too few are."""
        if count > self.num_free:
            raise PoolExhaustedError(
                f"{count} {self._pool.noun}s were asked for; {self.num_free} of {self._pool.size} "
                "are free."
            )
        while self._pool.num_free < count:
            self._evict(next(iter(self._idle)))
        pages = self._pool.allocate(count)
        self._holders.update(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of these named pages."""
        for page in pages:
            if page not in self._name_of:
                raise PoolError(f"The {self._pool.noun} {page} has no known content to share.")
            self._idle.pop(page, None)
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less; the last page of the list is the first to be given to others."""
        if len(set(pages)) != len(pages):
            raise PoolError(f"A {self._pool.noun} is named twice in {list(pages)}.")
        for page in pages:
            if self._holders[page] < 1:
                raise PoolError(f"The {self._pool.noun} {page} is held by nobody.")
        unnamed = []
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                unnamed.append(page)
        self._pool.free(unnamed)

    def publish(self, page: int, name: bytes) -> None:
        """What a held page contains, once it is written. Where another page has it, this one stays
        its holder's alone."""
        if self._holders[page] < 1:
            raise PoolError(f"The {self._pool.noun} {page} is held by nobody.")
        if page not in self._name_of and name not in self._page_of:
            self._name_of[page] = name
            self._page_of[name] = page

    def clear(self) -> None:
        """Forgets all contents; pages that are held stay so."""
        while self._idle:
            self._evict(next(iter(self._idle)))
        for name in list(self._page_of):
            self._unname(name)

    def _evict(self, page: int) -> None:
        del self._idle[page]
        self._unname(self._name_of[page])
        self._pool.free((page,))
        self.num_evictions += 1

    def _unname(self, name: bytes) -> None:
        del self._name_of[self._page_of.pop(name)]
        self._forget(name)
