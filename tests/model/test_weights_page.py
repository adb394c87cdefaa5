"""docs/weights.md against the code: the sizes of the presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdecode.config import ModelConfig
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.roster import roster

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_stated_sizes(name: str) -> None:
    (line,) = re.findall(rf"^\| `{name}` \|(.+)\|$", PAGE, re.MULTILINE)
    config = ModelConfig.from_checkpoint(released_config(PRESETS[name]))
    specs = list(roster(config))
    mla = [str(n) for n, kind in enumerate(config.layer_kinds) if kind == "mla"]
    expected = [
        f"{config.num_layers} ({', '.join(mla)})",
        str(config.hidden_size),
        f"{config.moe.num_experts}, {config.moe.top_k}",
        str(config.moe.latent_width or "none"),
        f"{len(specs):,}",
        f"{sum(spec.num_bytes for spec in specs):,}",
    ]
    assert [cell.strip() for cell in line.split("|")] == expected
