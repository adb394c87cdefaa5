"""What is shown of a reply, and when: stop strings over every way to cut the text into tokens."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kdecode.engine.text import TextStream


class Pieces:
    """A detokeniser whose token i is the i-th piece; `tail` is what its flush has left."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.tail


def _run(pieces: list[str], stop: tuple[str, ...], tail: str = "") -> tuple[str, bool]:
    stream = TextStream(Pieces(pieces, tail), stop)
    shown = "".join(stream.push(token) for token in range(len(pieces))) + stream.close()
    assert shown == stream.text
    return shown, stream.is_stopped


def _until_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """What a reader of the whole text would keep: up to the stop string that is complete first."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not ends:
        return text, False
    first_end = min(end for end, _ in ends)
    return text[: min(begin for end, begin in ends if end == first_end)], True


@given(
    text=st.text(alphabet="abc", max_size=24),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.sets(st.integers(0, 24)),
)
def test_shown_text_stops_where_it_should(text: str, stop: tuple[str, ...], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    # One character a token decides as early as can be; any other cut must show the same.
    assert _run(pieces, stop) == _run(list(text), stop) == _until_stop(text, stop)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert _run(["abc"], ("abc", "b")) == _run(["a", "b", "c"], ("abc", "b")) == ("a", True)


def test_nothing_follows_a_stop_string() -> None:
    pieces = ["one two ", "three four fi", "ve six", " seven"]
    assert _run(pieces, ("five",)) == ("one two three four ", True)


def test_what_might_begin_a_stop_string_is_held_until_decided() -> None:
    stream = TextStream(Pieces(["ab", "cx", "ab"]), ("abcd",))
    assert [stream.push(0), stream.push(1), stream.push(2), stream.close()] == [
        "",
        "abcx",
        "",
        "ab",
    ]


def test_the_flush_of_a_broken_character_is_shown_and_can_stop() -> None:
    assert _run(["ok"], (), tail="�") == ("ok�", False)
    assert _run(["ok"], ("k�",), tail="�") == ("o", True)


def test_stop_strings_are_not_looked_for_before_they_may_stop() -> None:
    stream = TextStream(Pieces(["end", " and end"]), ("end",))
    assert stream.push(0, can_stop=False) == "end"
    assert stream.push(1) == " and "
    assert stream.is_stopped
