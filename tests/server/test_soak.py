"""The soak: `python tests/server/soak.py MODEL` is the long run, this is that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak


def test_what_grows_is_not_flat() -> None:
    filling = [100.0 + min(i, 25) for i in range(100)]
    assert soak.growth(filling) == 0
    assert soak.growth([value + i * 0.1 for i, value in enumerate(filling)]) > soak.MOST_GROWTH
    with pytest.raises(ValueError, match="3 samples"):
        soak.growth([1.0, 1.0, 1.0])


@pytest.mark.slow
def test_a_short_soak(mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too short for memory, whose caches still fill; everything else has to hold."""
    wrong = soak.soak(mini_checkpoint, seconds=5, concurrency=16, every=0.5)
    assert [line for line in wrong if "memory grew" not in line] == []
    assert "0 faults" in capsys.readouterr().out
