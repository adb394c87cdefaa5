"""What the model card's evaluation says of generated text."""

from __future__ import annotations

import numpy as np
import pytest

from evaluate_model import held_out_parts, tokenizes


@pytest.mark.parametrize(
    ("text", "is_python"),
    [
        ("def f(x):\n    return x\n    x = (1,", True),
        ("def f(x):\n    return (x,\n", True),
        ('x = """a\nb\n', True),
        ("if x:\n        a\n    b\n", False),
        ("x = 'abc\ny = 1\n", False),
    ],
)
def test_text_is_read_to_its_last_whole_line(text: str, is_python: bool) -> None:
    assert tokenizes(text) is is_python


def test_excerpts_are_spread_from_end_to_end() -> None:
    parts = held_out_parts(np.arange(100, dtype=np.uint16), 3, 10)
    assert parts[0] == list(range(10))
    assert parts[-1] == list(range(90, 100))
