"""Which steps of different streams are in order, and how they are forked and joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from pretend_streams import install

from kdecode.decode.streams import MAIN, SideStreams, find_race, stream_text


@dataclass(frozen=True)
class Made:
    """A step. text: "reads > writes"."""

    op: str
    text: str = " > "
    stream: str = MAIN
    waits_for: tuple[str, ...] = ()
    run: Callable[[], None] = lambda: None

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.text.partition(">")[0].split())

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(self.text.partition(">")[2].split())


FORK = Made("fork", "x > a", "side", (MAIN,))
MADE_X = Made("first", "> x")


@pytest.mark.parametrize(
    "steps",
    [
        # One stream needs nothing.
        (MADE_X, Made("next", "x > x"), Made("last", "x >")),
        (MADE_X, FORK, Made("join", "a > b", waits_for=("side",))),
        # Both read, and each writes its own.
        (MADE_X, FORK, Made("beside", "x > b"), Made("join", "a b >", waits_for=("side",))),
        # Once one stream has waited for another it is behind all that this one had waited for.
        (
            MADE_X,
            FORK,
            Made("third", "a > c", "third", ("side",)),
            Made("join", "> x a", waits_for=("third",)),
        ),
        # What a side reads is overwritten behind the join, by a step that does not wait itself.
        (MADE_X, FORK, Made("join", waits_for=("side",)), Made("next", "> x a")),
    ],
)
def test_what_is_in_order(steps: tuple[Made, ...]) -> None:
    assert find_race(steps) is None


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            (MADE_X, Made("fork", "x > a", "side")),
            "step 1 (fork) on the stream side reads x without waiting for step 0 (first) on the "
            "stream main, which writes it",
        ),
        ((MADE_X, FORK, Made("join", "a >")), "step 2 (join) on the stream main reads a without"),
        # A value that is read is not overwritten meanwhile, nor one that is written.
        ((MADE_X, FORK, Made("next", "> x")), "writes x without waiting for step 1 (fork)"),
        ((MADE_X, FORK, Made("next", "> a")), "writes a without waiting for step 1 (fork)"),
        # A wait is for what was launched before it.
        (
            (MADE_X, Made("early", waits_for=("side",)), FORK, Made("late", "a >")),
            "step 3 (late) on the stream main reads a without waiting for step 2",
        ),
        (
            (FORK, MADE_X, Made("again", "x >", "side")),
            "step 1 (first) on the stream main writes x without waiting for step 0",
        ),
    ],
)
def test_what_is_not(steps: tuple[Made, ...], message: str) -> None:
    found = find_race(steps)
    assert found is not None
    assert message in found


def test_forks_and_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """By events of the streams, in the orders that they allow; twice, on the same streams."""
    device, ran, sides = install(monkeypatch), list[str](), SideStreams()

    def made(op: str, stream: str = MAIN, *waits_for: str) -> Made:
        return Made(op, " > ", stream, waits_for, lambda: device.launch(lambda: ran.append(op)))

    steps = [
        made("first"),
        made("ahead", "prefetch", MAIN),
        made("up", "shared", MAIN),
        made("down", "shared"),
        made("gate"),
        made("experts"),
        made("join", MAIN, "shared"),
        made("last"),
    ]
    whole = device.record(lambda: sides.launch(steps))
    whole.replay("sides early")
    assert ran == ["first", "ahead", "up", "down", "gate", "experts", "join", "last"]
    ran.clear()
    whole.replay("sides late")
    # Nobody waits for what is asked for ahead, except the end.
    assert ran == ["first", "gate", "experts", "up", "down", "join", "last", "ahead"]
    ran.clear()
    # A part that begins beside the plan's stream is forked from it, and finds the rest joined.
    device.record(lambda: sides.launch(steps[3:7])).replay("sides late")
    assert ran == ["gate", "experts", "down", "join"]


def test_one_stream_needs_no_device() -> None:
    ran = list[int]()
    SideStreams().launch([Made("step", run=lambda: ran.append(1))] * 3)
    assert ran == [1, 1, 1]


def test_a_wait_for_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of a plan whose other streams were joined behind the part before."""
    device, ran = install(monkeypatch), list[str]()
    join = Made(
        "join", waits_for=("shared",), run=lambda: device.launch(lambda: ran.append("join"))
    )
    ahead = Made("ahead", stream="prefetch", run=lambda: device.launch(lambda: ran.append("ahead")))
    device.record(lambda: SideStreams().launch([join, ahead])).replay()
    assert ran == ["join", "ahead"]


def test_as_plans_print_it() -> None:
    assert stream_text(MAIN, ()) == "main"
    assert stream_text("shared", (MAIN,)) == "shared after main"
    assert stream_text(MAIN, ("shared", "prefetch")) == "main after shared and prefetch"
