"""An outline has the formats, shapes and dtypes that packing a checkpoint gives."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from released import kimi_k3
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.engine.worker import packed_bytes
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.model.draft_synthesis import make_draft
from kdecode.model.draft_tiles import (
    outline_draft_plan,
    outline_draft_weights,
    pack_draft_plan,
)
from kdecode.model.draft_weights import load_draft
from kdecode.model.layout import TrunkFormat, pack_model, to_device
from kdecode.model.outline import outline_bytes, outline_model
from kdecode.model.weights import CheckpointReader


def _shapes(value: Any) -> Any:
    """The same structure, with a shape and a dtype for each tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return tuple(_shapes(item) for item in value)
    if is_dataclass(value) and not isinstance(value, ModelConfig):
        return {field.name: _shapes(getattr(value, field.name)) for field in fields(value)}
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, ModelConfig):
        value = tuple(getattr(value, field.name) for field in fields(value))
    return [tensor for item in value for tensor in _tensors(item)] if type(value) is tuple else []


@pytest.mark.parametrize("trunk_format", ["rows", "tiles"])
@pytest.mark.parametrize("checkpoint", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_outline_of_a_checkpoint(
    request: pytest.FixtureRequest, checkpoint: str, trunk_format: TrunkFormat
) -> None:
    directory: Path = request.getfixturevalue(checkpoint)
    packed = pack_model(CheckpointReader(directory), trunk_format)
    outline = outline_model(packed.config, trunk_format)
    assert _shapes(outline) == _shapes(packed)
    assert outline_bytes(outline) == packed_bytes(packed)


def test_outline_of_coded_experts_in_rows(mini_checkpoint: Path) -> None:
    packed = pack_model(CheckpointReader(mini_checkpoint), "rows", mxfp4="mxfp4_rows")
    outline = outline_model(packed.config, "rows", "mxfp4_rows")
    assert _shapes(outline) == _shapes(packed)
    assert outline_bytes(outline) == packed_bytes(packed)
    moved = to_device(packed, "meta")
    assert _shapes(moved) == _shapes(packed)
    for model in (outline, moved):
        stack = ExpertStack.of(model.layers[1].mlp.experts)  # type: ignore[union-attr]
        assert stack.gate_up.device.type == "meta"
        assert stack.num_experts == packed.config.moe.num_experts


def test_packed_tensors_move_to_a_device(mini_checkpoint: Path) -> None:
    packed = pack_model(CheckpointReader(mini_checkpoint), "tiles")
    moved = to_device(packed, "meta")
    assert _shapes(moved) == _shapes(packed)
    assert {tensor.device.type for tensor in _tensors(moved)} == {"meta"}
    loaded = pack_model(CheckpointReader(mini_checkpoint), "tiles", None, "meta")
    assert _shapes(loaded) == _shapes(packed)
    assert {tensor.device.type for tensor in _tensors(loaded)} == {"meta"}
    # What is in place already is not copied.
    places = [tensor.data_ptr() for tensor in _tensors(packed)]
    assert [tensor.data_ptr() for tensor in _tensors(to_device(packed, "cpu"))] == places


def test_outline_of_the_release_allocates_nothing() -> None:
    outline = outline_model(ModelConfig.from_checkpoint(kimi_k3()), "tiles")
    assert outline.embed.device.type == "meta"
    # The checkpoint's language model has 1,560.0e9 bytes; packing pads and widens vectors only.
    assert 1.559e12 < outline_bytes(outline) < 1.561e12


@pytest.mark.parametrize("kind", get_args(DraftKind))
def test_outline_of_a_draft(tmp_path: Path, kind: DraftKind) -> None:
    """Of every layout, as plans of a GPU have it; those with latent attention in tiles, too."""
    make_draft(tmp_path / "draft", "mini", kind, seed=0)
    config = DraftConfig.from_checkpoint(tmp_path / "draft")
    p = load_draft(tmp_path / "draft", config)
    packed = pack_draft_plan(p, config, "rows", None)
    stack = outline_draft_plan(config, "rows")
    assert _shapes(stack.layers) == _shapes(packed.layers)
    around, own = (
        replace(weights, embed=None, head=None)
        for weights in (outline_draft_weights(config, stack), packed)
    )
    assert _shapes(around) == _shapes(own)
    if kind in ("inferact", "lightseek"):
        tiles = pack_draft_plan(p, config, "tiles", None)
        assert _shapes(outline_draft_plan(config, "tiles").layers) == _shapes(tiles.layers)
        return
    with pytest.raises(ValueError, match="are packed in rows; tiles was asked for"):
        pack_draft_plan(p, config, "tiles", None)
