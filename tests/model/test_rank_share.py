"""What ranks have of a model: every tensor cut and put together again, and read from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from released import kimi_k3, kimi_linear
from torch import Tensor

from kdecode.config import ConfigError, ModelConfig
from kdecode.model.layout import PackedMoe, pack_model
from kdecode.model.outline import outline_bytes, outline_model
from kdecode.model.presets import PRESETS, RELEASES, released_config
from kdecode.model.rank_share import (
    GATHERED,
    cut_of,
    join,
    part_shape,
    refuse_division,
    release_config,
    share_of,
    stage_exchange,
    take,
)
from kdecode.model.roster import TensorSpec, default_prefix, layer_slots, model_slots
from kdecode.model.shards import DTYPES
from kdecode.model.unpack import unpack_gated, unpack_kda, unpack_mla
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import Ranks

SIZES = (1, 2, 4, 8, 16)
FAMILIES = {
    "mini-16": "mini_16_checkpoint",
    "kimi-linear-mini-16": "mini_linear_16_checkpoint",
}


def preset(name: str) -> ModelConfig:
    return ModelConfig.from_checkpoint(released_config(PRESETS[name]))


def every_slot(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """Of all layers; shapes in canonical form."""
    prefix = default_prefix(config)
    yield from model_slots(config, prefix).items()
    for layer in range(config.num_layers):
        for slot, spec in layer_slots(config, layer, prefix).items():
            is_padded = slot == "attention.a_log"
            yield slot, replace_shape(spec, (config.kda.num_heads,)) if is_padded else spec


def replace_shape(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return spec._replace(shapes=(shape,))


def drawn(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Any bits."""
    size = spec.num_bytes
    data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(DTYPES[spec.dtype]).view(spec.shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_what_its_parts_make_together(name: str, size: int) -> None:
    config, generator = preset(name), torch.Generator().manual_seed(0)
    seen = set[str]()
    for slot, spec in every_slot(config):
        # One expert is like another.
        if slot.startswith("mlp.w") and slot.split(".")[2] not in ("0", "7"):
            continue
        whole = drawn(spec, generator)
        parts = [take(whole, slot, Ranks(rank, size)) for rank in range(size)]
        assert {tuple(part.shape) for part in parts} == {part_shape(spec.shape, slot, size)}
        assert torch.equal(bits(join(parts, slot)), bits(whole)), slot
        seen.add(cut_of(slot))
    assert seen == {"whole", "rows", "columns"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_have_the_shapes_of_the_share(name: str, size: int) -> None:
    """All but the matrices whose rows are gathered: the share's configuration has those whole."""
    config = preset(name)
    share = every_slot(share_of(config, size))
    for (slot, spec), (_, local) in zip(every_slot(config), share, strict=True):
        own = local.shape
        expected = part_shape(own, slot, size) if slot in GATHERED else own
        assert part_shape(spec.shape, slot, size) == expected, slot


def test_codes_and_scales_of_an_expert_are_cut_at_the_same_columns() -> None:
    """A group of 32 columns has 16 bytes of codes and one of scales."""
    columns = torch.arange(512)
    codes, scales = columns.view(1, -1, 2)[..., 0] // 2, columns.view(1, -1, 32)[..., 0] // 32
    for rank in range(16):
        own = take(codes, "mlp.w2.5.packed", Ranks(rank, 16))
        assert own.unique().tolist() == list(range(16 * rank, 16 * rank + 16))
        assert take(scales, "mlp.w2.5.scale", Ranks(rank, 16)).tolist() == [[rank]]


def test_a_slot_that_no_model_has_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="qkv_proj"):
        cut_of("attention.qkv_proj")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_reads_its_part_of_every_tensor_and_no_more(
    name: str, size: int, request: pytest.FixtureRequest
) -> None:
    directory, config = request.getfixturevalue(FAMILIES[name]), preset(name)
    specs = [(slot, spec) for slot, spec in every_slot(config) if not spec.is_optional]
    whole = sum(spec.num_bytes for _, spec in specs)
    copies = sum(spec.num_bytes for slot, spec in specs if cut_of(slot) == "whole")
    readers = [CheckpointReader(directory, ranks=Ranks(rank, size)) for rank in range(size)]
    models = [reader.load_model() for reader in readers]
    assert sum(reader.bytes_taken for reader in readers) == whole + (size - 1) * copies
    assert len({reader.bytes_taken for reader in readers}) == 1
    complete = CheckpointReader(directory).load_model()
    assert torch.equal(join([m.embed for m in models], "embed"), complete.embed)
    for layer, parameters in enumerate(complete.layers):
        ours = [model.layers[layer] for model in models]
        for field in vars(parameters.attention):
            parts = [getattr(part.attention, field) for part in ours]
            expected = getattr(parameters.attention, field)
            if expected is None:
                assert parts == [None] * size
            else:
                assert torch.equal(join(parts, f"attention.{field}"), expected), field


@pytest.mark.parametrize("trunk", ["rows", "tiles", "tiles12"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_shares_are_the_packed_model_in_parts(
    name: str, trunk: Any, request: pytest.FixtureRequest
) -> None:
    """Through the packed forms and back: heads, widths and gathered rows of four ranks."""
    directory, size = request.getfixturevalue(FAMILIES[name]), 4
    whole = pack_model(CheckpointReader(directory), trunk)
    readers = [CheckpointReader(directory, ranks=Ranks(rank, size)) for rank in range(size)]
    shares = [pack_model(reader, trunk) for reader in readers]
    assert [share.config for share in shares] == [share_of(whole.config, size)] * size
    for layer, kind in enumerate(whole.config.layer_kinds):
        unpack: Callable[[ModelConfig, Any], dict[str, Tensor]]
        unpack = unpack_kda if kind == "kda" else unpack_mla
        expected = unpack(whole.config, whole.layers[layer].attention)
        found = [unpack(share.config, share.layers[layer].attention) for share in shares]
        for field, tensor in expected.items():
            parts = [part[field] for part in found]
            assert torch.equal(join(parts, f"attention.{field}"), tensor), (layer, field)
        mlps = [share.layers[layer].mlp for share in shares]
        complete = whole.layers[layer].mlp
        if isinstance(complete, PackedMoe):
            assert complete.shared is not None
            complete, mlps = complete.shared, [mlp.shared for mlp in mlps]  # type: ignore[union-attr]
        gated = [unpack_gated(mlp) for mlp in mlps]  # type: ignore[arg-type]
        for place, field in enumerate(("gate_proj", "up_proj", "down_proj")):
            parts = [part[place] for part in gated]
            joined = join(parts, f"mlp.{field}")  # type: ignore[arg-type]
            assert torch.equal(joined, unpack_gated(complete)[place]), (layer, field)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "released"), [("kimi-k3", kimi_k3), ("kimi-linear-48b", kimi_linear)]
)
def test_shapes_are_those_of_the_release(name: str, released: Callable[[], Any]) -> None:
    assert ModelConfig.from_checkpoint(released_config(RELEASES[name])) == (
        ModelConfig.from_checkpoint(released())
    )


def test_a_share_divides_heads_widths_and_vocabulary_only() -> None:
    whole = ModelConfig.from_checkpoint(kimi_k3())
    share = share_of(release_config("kimi-k3", 4), 16)
    assert (share.kda.num_heads, share.mla.num_heads) == (6, 6)
    assert (share.moe.expert_width, share.moe.shared_width) == (192, 384)
    assert (share.dense_width, share.vocab_size) == (2112, 10_240)
    assert share.layer_kinds == ("kda", "kda", "kda", "mla")
    assert (share.hidden_size, share.moe.num_experts) == (whole.hidden_size, 896)
    assert share.moe.latent_width == whole.moe.latent_width
    # A layer's experts, shared experts and gathered matrices are a sixteenth of the release's.
    packed = outline_model(share, "tiles", ranks=Ranks(0, 16)).layers[1].mlp
    complete = outline_model(whole, "tiles").layers[1].mlp
    assert isinstance(packed, PackedMoe)
    assert isinstance(complete, PackedMoe)
    assert packed.router.rows == 56
    for field in ("experts", "shared", "latent_down", "latent_up"):
        part, of = (outline_bytes(getattr(moe, field)) for moe in (packed, complete))
        assert part * 16 == of, field


def test_what_ranks_exchange_is_what_divided_products_write() -> None:
    k3 = ModelConfig.from_checkpoint(kimi_k3())
    share = share_of(k3, 16)
    stages = ("attn_out_proj", "route", "latent_down", "experts", "latent_up", "kda_step", "head")
    found = [stage_exchange(share, 16, stage) for stage in stages]
    assert [None if one is None else (one.kind, one.value, one.row_bytes) for one in found] == [
        ("reduce", "attn_delta", 28_672),
        ("gather", "router_logits", 224),
        ("gather", "latent", 448),
        ("reduce", "expert_sum", 14_336),
        ("gather", "routed", 896),
        None,
        ("gather", "logits", 20_480),
    ]
    assert [stage_exchange(k3, 1, stage) for stage in stages] == [None] * 7


def test_everything_that_cannot_be_divided_is_said_at_once() -> None:
    k3 = ModelConfig.from_checkpoint(kimi_k3())
    assert [refuse_division(k3, size) for size in SIZES] == [[]] * 5
    reasons = refuse_division(k3, 5)
    assert reasons[0] == "96 KDA heads cannot be divided among 5 ranks."
    # The vocabulary is a multiple of 5.
    assert len(reasons) == 7
    # 3072 / 64 would cut groups of 32 in half.
    assert "3072 columns of an expert cannot be divided among 64 ranks in groups of 32." in (
        refuse_division(k3, 64)
    )
    with pytest.raises(ConfigError, match=r"96 KDA heads .* 96 MLA heads .* in groups of 32"):
        share_of(k3, 64)
    odd = replace(k3, dense_width=33_793)
    assert refuse_division(odd, 1) == []
    assert refuse_division(odd, 2) == [
        "33793 columns of a dense MLP cannot be divided among 2 ranks in groups of 2."
    ]


def test_a_release_needs_a_layer_of_each_kind() -> None:
    with pytest.raises(ConfigError, match="3 layers of kimi-k3; it must be from 4 to 93"):
        release_config("kimi-k3", 3)


def test_a_checkpoint_that_ranks_cannot_share_is_refused(mini_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="4 KDA heads cannot be divided among 8 ranks"):
        CheckpointReader(mini_checkpoint, ranks=Ranks(0, 8))
