"""One rank's share of a release, and checkpoints that are made up while they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from released import kimi_k3, kimi_linear

from kdecode.config import ConfigError, ModelConfig
from kdecode.model.layout import PackedKda, PackedMoe, pack_model
from kdecode.model.outline import outline_bytes, outline_model
from kdecode.model.presets import PRESETS, RELEASES, released_config
from kdecode.model.rank_share import RandomReader, exchanged_buffers, share_of_release


@pytest.mark.parametrize(
    ("name", "released"), [("kimi-k3", kimi_k3), ("kimi-linear-48b", kimi_linear)]
)
def test_shapes_are_those_of_the_release(name: str, released: Callable[[], Any]) -> None:
    assert ModelConfig.from_checkpoint(released_config(RELEASES[name])) == (
        ModelConfig.from_checkpoint(released())
    )


def test_a_share_divides_heads_widths_and_vocabulary_only() -> None:
    whole = ModelConfig.from_checkpoint(kimi_k3())
    share = share_of_release("kimi-k3", 4, 16, 3)
    assert (share.kda.num_heads, share.mla.num_heads) == (6, 6)
    assert (share.moe.expert_width, share.moe.shared_width) == (192, 384)
    assert (share.dense_width, share.vocab_size) == (2112, 10_240)
    assert share.layer_kinds == ("kda", "kda", "kda", "mla")
    assert (share.hidden_size, share.moe.num_experts) == (whole.hidden_size, 896)
    assert share.moe.latent_width == whole.moe.latent_width
    # A layer's experts and shared experts together are a sixteenth of the release's.
    packed = outline_model(share, "tiles").layers[1].mlp
    complete = outline_model(whole, "tiles").layers[1].mlp
    assert isinstance(packed, PackedMoe)
    assert isinstance(complete, PackedMoe)
    assert outline_bytes(packed.experts) * 16 == outline_bytes(complete.experts)
    assert outline_bytes(packed.shared) * 16 == outline_bytes(complete.shared)


def test_what_ranks_would_exchange_is_what_divided_products_write() -> None:
    k3, linear = (ModelConfig.from_checkpoint(document()) for document in (kimi_k3, kimi_linear))
    assert exchanged_buffers(k3, 0) == ("attn_delta", "mlp_delta")
    assert exchanged_buffers(k3, 1) == ("attn_delta", "expert_sum", "shared")
    # Experts without latents are summed with the shared ones before anything is exchanged.
    assert exchanged_buffers(linear, 1) == ("attn_delta", "mlp_delta")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kimi-k3", 4, 16, 16), "rank is 16; with 16 ranks it must be from 0 to 15"),
        (("kimi-k3", 3, 16, 0), "3 layers of kimi-k3; it must be from 4 to 93"),
        (("kimi-k3", 4, 5, 0), "96 KDA heads cannot be divided among 5 ranks"),
        # 3072 / 64 would cut groups of 32 in half; heads fail first from there on.
        (("kimi-k3", 4, 64, 0), "96 KDA heads cannot be divided among 64 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share_of_release(*arguments)


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
