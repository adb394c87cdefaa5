"""Pictures of the model card. Owns how they look; the figures come from logs and evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes

_SMOOTH_STEPS = 25


@contextmanager
def _picture(path: Path, x: str, y: str) -> Iterator[Axes]:
    # Without a date and random names, so that the same figures make the same file.
    with pyplot.rc_context({"svg.hashsalt": "k3-tiny", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        yield axes
        axes.legend()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def losses(log: list[dict[str, Any]], evaluation: dict[str, Any], path: Path) -> None:
    """Training loss, smoothed, and held-out bits per byte beside the 5-gram model's."""
    with _picture(path, "step", "nats per token; bits per byte") as axes:
        values = [entry["loss"] for entry in log]
        smooth = [
            sum(values[max(0, i - _SMOOTH_STEPS) : i + 1])
            / len(values[max(0, i - _SMOOTH_STEPS) : i + 1])
            for i in range(len(values))
        ]
        axes.plot([entry["step"] for entry in log], smooth, label="training loss, nats per token")
        seen = [entry for entry in log if "held_out_bits_per_byte" in entry]
        axes.plot(
            [entry["step"] for entry in seen],
            [entry["held_out_bits_per_byte"] for entry in seen],
            label="held out, bits per byte",
        )
        axes.axhline(
            evaluation["ngram"]["whole"], color="gray", ls="--", label="5-gram, bits per byte"
        )
        axes.set_ylim(0, 6)


def draft(log: list[dict[str, Any]], path: Path) -> None:
    """Expected accepted length of the draft on held-out text over its training."""
    with _picture(path, "step", "expected tokens a round") as axes:
        seen = [entry for entry in log if "held_out_accepted_length" in entry]
        axes.plot(
            [entry["step"] for entry in seen],
            [entry["held_out_accepted_length"] for entry in seen],
            label="held out, the text as prefix",
        )


def acceptance(figures: dict[str, Any], path: Path) -> None:
    """How often a draft at each place is accepted."""
    with _picture(path, "place of the draft", "accepted") as axes:
        for name, entry in figures.items():
            rates = entry["rate_by_place"]
            label = f"{name}: {entry['acceptance_length']:.2f} tokens a round"
            axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
        axes.set_ylim(0, 1)


def calibration(bins: list[dict[str, float]], path: Path) -> None:
    """Reliability of the confidence head; the area of a point is its share of all drafts."""
    with _picture(path, "confidence", "accepted at temperature 1") as axes:
        axes.plot([0, 1], [0, 1], color="gray", ls="--", label="perfect")
        axes.scatter(
            [entry["confidence"] for entry in bins],
            [entry["accepted"] for entry in bins],
            s=[600 * entry["share"] + 4 for entry in bins],
            label="drafts, by confidence",
        )
