"""The policy of routing, without anything to route."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kdecode.replicas.affinity import Affinity

IDLE = {"a": 0, "b": 0, "c": 0}


def test_a_prefix_stays_where_it_is() -> None:
    affinity = Affinity(max_load_gap=4)
    affinity.learn(["p", "pq"], "b")
    assert affinity.order(["p"], IDLE)[0] == "b"
    assert affinity.order(["p", "pq", "pqr"], IDLE)[0] == "b"
    # Until it has four requests more than the least loaded one.
    assert affinity.order(["p"], {"a": 2, "b": 5, "c": 3})[0] == "b"
    assert affinity.order(["p"], {"a": 2, "b": 6, "c": 3}) == ["a", "c", "b"]


def test_the_longest_prefix_counts_and_then_the_next() -> None:
    affinity = Affinity(max_load_gap=4)
    affinity.learn(["p"], "a")
    affinity.learn(["p", "pq"], "b")
    assert affinity.order(["p", "pq"], {"a": 0, "b": 3, "c": 0})[0] == "b"
    # The one that has all of it is overloaded; one that has some of it is next.
    assert affinity.order(["p", "pq"], {"a": 1, "b": 4, "c": 0})[0] == "a"
    # Two that have it: the less loaded one.
    affinity.learn(["p", "pq"], "c")
    assert affinity.order(["p", "pq"], {"a": 0, "b": 2, "c": 1})[0] == "c"


def test_what_is_new_goes_to_the_least_loaded() -> None:
    affinity = Affinity(max_load_gap=4)
    assert affinity.order(["new"], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert affinity.order([], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert affinity.order(["new"], {}) == []


def test_routers_agree_on_what_is_new_to_both_and_spread_it() -> None:
    one, other = Affinity(4), Affinity(4)
    chosen = [one.order([f"prefix {i}"], IDLE)[0] for i in range(300)]
    backwards = dict(reversed(IDLE.items()))
    assert chosen == [other.order([f"prefix {i}"], backwards)[0] for i in range(300)]
    assert min(Counter(chosen)[replica] for replica in IDLE) > 60


def test_a_replica_that_is_gone_holds_nothing() -> None:
    affinity = Affinity(max_load_gap=4)
    affinity.learn(["p"], "a")
    affinity.learn(["p", "pq"], "b")
    affinity.keep_only({"a", "c"})
    assert affinity.order(["p", "pq"], {"a": 2, "c": 0})[0] == "a"
    # Nor one that cannot be chosen now.
    assert affinity.order(["p"], {"b": 0, "c": 0})[0] in ("b", "c")


def test_what_was_used_last_is_kept() -> None:
    affinity = Affinity(max_load_gap=4, max_names=2)
    for name in ("one", "two", "one", "three"):
        affinity.learn([name], "c")
    busy = {"a": 0, "b": 0, "c": 1}
    assert affinity.order(["one"], busy)[0] == "c"
    assert affinity.order(["three"], busy)[0] == "c"
    assert affinity.order(["two"], busy)[0] != "c"


def test_hits_of_groups_that_share_a_prefix() -> None:
    """Requests of 40 groups in random order, ten at a time, on two replicas."""

    def hits(choose) -> int:  # type: ignore[no-untyped-def]
        rng = random.Random(5)
        requests = [f"group {i}" for i in range(40) for _ in range(6)]
        rng.shuffle(requests)
        seen: set[tuple[str, str]] = set()
        running: list[str] = []
        found = 0
        for name in requests:
            if len(running) == 10:
                running.pop(rng.randrange(10))
            loads = {replica: running.count(replica) for replica in ("a", "b")}
            replica = choose(name, loads, rng)
            running.append(replica)
            found += (name, replica) in seen
            seen.add((name, replica))
            assert abs(running.count("a") - running.count("b")) <= 8
        return found

    affinity = Affinity(max_load_gap=8)

    def by_prefix(name: str, loads: dict[str, int], rng: random.Random) -> str:
        replica = affinity.order([name], loads)[0]
        affinity.learn([name], replica)
        return replica

    possible = 40 * 5
    assert hits(by_prefix) > 0.97 * possible
    assert hits(lambda name, loads, rng: min(loads, key=loads.__getitem__)) < 0.85 * possible


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_load_gap is 0"):
        Affinity(max_load_gap=0)
