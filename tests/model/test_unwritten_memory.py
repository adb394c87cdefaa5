"""Packing reads every tensor of a checkpoint, and writes every number of every packed one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kdecode.model import layout
from kdecode.model.layout import pack_model
from kdecode.model.shards import CheckpointError
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import bit_equal
from kdecode.testing.poison import poison_


def _tensors(node: Any, name: str = "packed") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield name, node
    elif isinstance(node, tuple):
        for index, child in enumerate(node):
            yield from _tensors(child, f"{name}[{index}]")
    elif is_dataclass(node):
        for field in fields(node):
            yield from _tensors(getattr(node, field.name), f"{name}.{field.name}")


@pytest.mark.parametrize("trunk", ["rows", "tiles"])
@pytest.mark.parametrize("family", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_packing_into_poisoned_memory_gives_the_same_weights(
    family: str, trunk: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory: Path = request.getfixturevalue(family)
    plain = pack_model(CheckpointReader(directory), trunk)  # type: ignore[arg-type]
    taken = []

    def poisoned(allocate: Any) -> Any:
        def take(*args: Any, **options: Any) -> Tensor:
            taken.append(args)
            return poison_(allocate(*args, **options))

        return take

    monkeypatch.setattr(layout, "empty_huge", poisoned(layout.empty_huge))
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    again = pack_model(CheckpointReader(directory), trunk)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert taken
    for (name, tensor), (_, wanted) in zip(_tensors(again), _tensors(plain), strict=True):
        bit_equal(tensor, wanted, name)
        if tensor.is_floating_point():
            assert bool(torch.isfinite(tensor.float()).all()), name


def test_packing_refuses_a_tensor_that_it_never_read(
    mini_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that comes from elsewhere leaves this reader's own tensors of it unread."""
    reader, elsewhere = CheckpointReader(mini_checkpoint), CheckpointReader(mini_checkpoint)
    own = reader.load_layer
    monkeypatch.setattr(
        reader, "load_layer", lambda layer: (elsewhere.load_layer if layer == 2 else own)(layer)
    )
    with pytest.raises(CheckpointError, match=r"tensors were never read, e\.g\. .*layers\.2\."):
        pack_model(reader, "tiles")
