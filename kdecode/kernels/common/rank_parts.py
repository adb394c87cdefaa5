"""What the ranks of a CUDA plan give each other: the parts of every exchange, and where they lie.

An exchange hands one block of each rank to all of them: this rank's parts of some values, one
behind the other. Steps before it write the parts into this rank's block; the step behind it reads
those of all ranks where they are, by address, in the order of the ranks. Knows neither ops nor what
moves the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kdecode.config import ModelConfig

BF16, FP32 = torch.bfloat16, torch.float32

Place = Literal["embed", "attn", "mlp", "gate", "experts", "routed", "head"]

# Parts begin at multiples of so many bytes, for loads of any width.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Part:
    """[rows, width] that each rank has of ``value``: in fp32 a part of every sum, else columns.

    buffer: the plan's name of it.
    """

    buffer: str
    value: str
    width: int
    dtype: torch.dtype


def parts_of(config: ModelConfig, size: int) -> dict[Place, tuple[Part, ...]]:
    """Of each exchange that a plan has. config: of one of ``size`` ranks."""
    width, moe = config.hidden_size, config.moe
    found: dict[Place, tuple[Part, ...]] = {
        "embed": (Part("embed_part", "prefix", width, BF16),),
        "attn": (Part("attn_part", "attn_delta", width, FP32),),
        "head": (Part("logits_part", "logits", config.vocab_size, BF16),),
    }
    if "dense" in config.mlp_kinds:
        found["mlp"] = (Part("mlp_part", "mlp_delta", width, FP32),)
    if "moe" not in config.mlp_kinds:
        return found
    gate = [Part("router_part", "router_logits", moe.num_experts // size, FP32)]
    sums = [Part("expert_part", "expert_sum", moe.latent_width or width, FP32)]
    if moe.latent_width is not None:
        gate.append(Part("latent_part", "latent", moe.latent_width // size, BF16))
        found["routed"] = (Part("routed_part", "routed", width // size, BF16),)
    if moe.num_shared:
        sums.append(Part("shared_part", "shared", width, FP32))
    return {**found, "gate": tuple(gate), "experts": tuple(sums)}


def offsets(parts: Sequence[Part], rows: int) -> tuple[Mapping[str, int], int]:
    """Where in a block each part begins, by its buffer, and the block's size, in bytes."""
    begins, end = {}, 0
    for part in parts:
        begins[part.buffer] = end
        size = rows * part.width * part.dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def place_of(config: ModelConfig, size: int, buffer: str) -> Place:
    """The exchange that a part belongs to. ValueError for a buffer that is no part."""
    for place, parts in parts_of(config, size).items():
        if any(part.buffer == buffer for part in parts):
            return place
    raise ValueError(f"{buffer} is no part that ranks exchange.")
