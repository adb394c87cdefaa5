"""Which replica a request goes to: where its prefix is, unless that one is overloaded.

Owns what was sent where, by name, and the order of replicas for a request. Does not know what a
name stands for, nor how loads are known. Nothing here waits, and equal calls give equal answers.

A replica is overloaded when it has `max_load_gap` requests more than the least loaded one: then a
request would wait there longer than a free replica needs to compute its prefix again. The request
goes on to holders of a shorter prefix, and at last to the least loaded replica, which holds the
prefix from then on as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

# A request has some ten names, so this is what some thousands of requests began with.
MAX_NAMES = 65_536


class Affinity:
    def __init__(self, max_load_gap: int, max_names: int = MAX_NAMES) -> None:
        if max_load_gap < 1 or max_names < 1:
            raise ValueError(
                f"max_load_gap is {max_load_gap} and max_names {max_names}; both must be at "
                "least 1."
            )
        self._max_load_gap = max_load_gap
        self._max_names = max_names
        # The name that was used last is the last one.
        self._holders: OrderedDict[str, set[str]] = OrderedDict()

    def order(self, names: Sequence[str], loads: Mapping[str, int]) -> list[str]:
        """Replicas, the best first. names: of the request's prefixes, the longest last.

        loads: requests of each replica that may be chosen. Of equally loaded ones a digest chooses,
        so that routers which know nothing of one another agree on a prefix that is new to all.
        """
        first = names[0] if names else ""
        order = sorted(loads, key=lambda replica: (loads[replica], _weight(first, replica)))
        limit = loads[order[0]] + self._max_load_gap if order else 0
        for name in reversed(names):
            holders = self._holders.get(name, set())
            for place, replica in enumerate(order):
                if replica in holders and loads[replica] < limit:
                    return [replica, *order[:place], *order[place + 1 :]]
        return order

    def learn(self, names: Sequence[str], replica: str) -> None:
        """A request with these names was sent to this replica."""
        for name in names:
            self._holders.setdefault(name, set()).add(replica)
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_names:
            self._holders.popitem(last=False)

    def keep_only(self, replicas: Collection[str]) -> None:
        """What replicas that are gone held is gone with them."""
        alive = frozenset(replicas)
        for name, holders in list(self._holders.items()):
            holders &= alive
            if not holders:
                del self._holders[name]


def _weight(name: str, replica: str) -> bytes:
    return blake2b(f"{name} {replica}".encode(), digest_size=8).digest()
