"""One rank's part of a small model, cut from parameters that the whole model has."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from triton_cases import Case, packed_case

from kdecode.config import ModelConfig
from kdecode.model.parameters import Mxfp4
from kdecode.model.rank_share import share_of, take
from kdecode.parallel.ranks import Ranks


def divisible(config: ModelConfig) -> ModelConfig:
    """By two."""
    return replace(
        config,
        vocab_size=178,
        kda=replace(config.kda, num_heads=4),
        mla=replace(config.mla, num_heads=4),
        moe=replace(config.moe, expert_width=64),
    )


def rank_case(case: Case, ranks: Ranks) -> Case:
    """What one of several has of a model that they can share."""
    return packed_case(share_of(case.config, ranks.size), cut(case.parameters, "", ranks))


def cut(value: Any, slot: str, ranks: Ranks) -> Any:
    """A rank's part of canonical parameters, by the table of `rank_share`."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return take(value, slot, ranks)
    if isinstance(value, Mxfp4):
        return Mxfp4(take(value.packed, slot, ranks), take(value.scale, slot, ranks))
    if isinstance(value, tuple):
        names = ["" if slot == "layers" else f"{slot}.{number}" for number in range(len(value))]
        return tuple(cut(item, name, ranks) for item, name in zip(value, names, strict=True))
    assert is_dataclass(value)
    prefix = f"{slot}." if slot else ""
    parts = {f.name: cut(getattr(value, f.name), prefix + f.name, ranks) for f in fields(value)}
    return replace(value, **parts)  # type: ignore[type-var]
