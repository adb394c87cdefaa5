"""Checkpoints that are made up while they are read, whole and a rank's share."""

from __future__ import annotations

import pytest
import torch

from kdecode.config import ModelConfig
from kdecode.model.layout import PackedKda, PackedMoe, pack_model
from kdecode.model.outline import outline_bytes, outline_model
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.random_reader import RandomReader
from kdecode.parallel.ranks import Ranks


@pytest.mark.parametrize("preset", ["mini", "kimi-linear-mini"])
def test_a_made_up_checkpoint_packs_like_a_real_one(preset: str) -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS[preset]))
    packed = pack_model(RandomReader(config, 0), "tiles")
    assert outline_bytes(packed) == outline_bytes(outline_model(config, "tiles"))
    layers = packed.layers[1:3]
    first, second = (layer.attention for layer in layers)
    assert isinstance(first, PackedKda)
    assert isinstance(second, PackedKda)
    assert not torch.equal(first.in_proj.data, second.in_proj.data)
    again = pack_model(RandomReader(config, 0), "tiles")
    other = pack_model(RandomReader(config, 1), "tiles")
    assert torch.equal(packed.head.data, again.head.data)
    assert not torch.equal(packed.head.data, other.head.data)
    experts = layers[0].mlp
    assert isinstance(experts, PackedMoe)
    assert all(torch.isfinite(e.down.data.float()).all() for e in experts.experts)


@pytest.mark.parametrize("trunk", ["rows", "tiles"])
@pytest.mark.parametrize("preset", ["mini-16", "kimi-linear-mini-16"])
def test_a_made_up_share_has_the_shapes_of_its_outline(preset: str, trunk: str) -> None:
    config, ranks = ModelConfig.from_checkpoint(released_config(PRESETS[preset])), Ranks(3, 16)
    reader = RandomReader(config, 0, ranks)
    packed = pack_model(reader, trunk)  # type: ignore[arg-type]
    outline = outline_model(reader.config, trunk, ranks=ranks)  # type: ignore[arg-type]
    assert outline_bytes(packed) == outline_bytes(outline)
    mixture = packed.layers[1].mlp
    assert isinstance(mixture, PackedMoe)
    assert mixture.router.rows * 16 == config.moe.num_experts
