"""Needle items: their form, and what counts as found."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdecode.engine.engine import LLM
from kdecode.eval.needles import Needle, find, make_items, needle


def test_an_item_can_be_answered_from_its_first_line_only() -> None:
    item = needle(random.Random(3), "x = 1")
    first, *_, last = item.prompt.split("\n")
    assert first == last + item.answer.rstrip("\n")
    assert item.prompt.count(item.answer.strip()) == 1
    assert needle(random.Random(4), "x = 1").answer != item.answer


def test_items_have_the_distance_and_follow_from_the_seed(mini_checkpoint: Path) -> None:
    llm = LLM(mini_checkpoint)
    text = Path(__file__).read_text(encoding="utf-8")
    ids = llm.tokenizer.encode_text(text)
    items = make_items(llm.tokenizer, ids, 200, count=3, seed=5)
    assert items == make_items(llm.tokenizer, ids, 200, count=3, seed=5)
    assert items != make_items(llm.tokenizer, ids, 200, count=3, seed=6)
    for item in items:
        assert len(llm.tokenizer.encode_text(item.prompt)) == pytest.approx(200, abs=60)
    assert len(find(llm, items)) == 3
    with pytest.raises(ValueError, match="cannot be cut"):
        make_items(llm.tokenizer, ids, len(ids) + 1, count=1, seed=0)


@dataclass
class Parrot:
    """Says the same whatever it is asked, as far as it is let."""

    text: str

    def generate(self, prompts: list[str], params: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(text=self.text, error=None)]


@pytest.mark.parametrize(
    ("reply", "is_found"),
    [(" abcdef\n", True), (" abcdef", True), (" abcdefg", False), ("abcdef\n", False), ("", False)],
)
def test_found_is_the_whole_key_and_nothing_more(reply: str, is_found: bool) -> None:
    assert find(Parrot(reply), [Needle("k =", " abcdef\n")]) == [is_found]  # type: ignore[arg-type]
