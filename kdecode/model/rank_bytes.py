"""The bytes of a model that each of several ranks has, and those that a step of one row reads.

Owns the accounting, tensor by tensor from the table in `rank_share.py`; bytes are the checkpoint's.
State, caches and what is exchanged are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kdecode.config import ModelConfig
from kdecode.model.rank_share import Cut, cut_of, share_of
from kdecode.model.roster import Slots, default_prefix, layer_slots, model_slots

# What a rank reads in every step whole, where only heads, widths and the vocabulary are divided.
ROUTER_SLOTS = ("mlp.router", "mlp.latent_down")


@dataclass(frozen=True)
class TensorBytes:
    """One tensor, or those of a kind in all experts of a layer.

    whole: in the checkpoint. read: of those what a step of one row reads, of all ranks together
    where the tensor is divided.
    """

    slot: str
    cut: Cut
    whole: int
    read: int

    def of_rank(self, num_bytes: int, size: int) -> int:
        """One rank's part of ``whole`` or of ``read``."""
        return num_bytes if self.cut == "whole" else num_bytes // size


@dataclass(frozen=True)
class KindBytes:
    """The tensors of one layer of a kind, or of what is outside of the layers."""

    name: str
    count: int
    size: int
    tensors: tuple[TensorBytes, ...]

    @property
    def divided(self) -> int:
        """Bytes that one rank has of divided tensors."""
        return sum(self._part(t) for t in self.tensors if t.cut != "whole")

    @property
    def copied(self) -> int:
        """Bytes of what every rank has whole."""
        return sum(t.whole for t in self.tensors if t.cut == "whole")

    @property
    def divided_read(self) -> int:
        """What a rank reads in a step of one row."""
        return sum(t.of_rank(t.read, self.size) for t in self.tensors if t.cut != "whole")

    @property
    def copied_read(self) -> int:
        return sum(t.read for t in self.tensors if t.cut == "whole")

    @property
    def all_ranks(self) -> int:
        """Bytes that all ranks have together, of all layers of the kind."""
        return self.count * self.size * (self.divided + self.copied)

    @property
    def whole(self) -> int:
        """Bytes of the checkpoint, of all layers of the kind."""
        return self.count * sum(t.whole for t in self.tensors)

    def read_with_whole(self, slots: tuple[str, ...]) -> tuple[int, int]:
        """What a rank would read of a layer if it had these tensors whole, and how much of it they
        are."""
        kept = [t for t in self.tensors if t.slot in slots]
        saved = sum(t.read - t.of_rank(t.read, self.size) for t in kept)
        return self.divided_read + self.copied_read + saved, sum(t.read for t in kept)

    def _part(self, tensor: TensorBytes) -> int:
        return tensor.of_rank(tensor.whole, self.size)


def rank_bytes(config: ModelConfig, size: int) -> tuple[KindBytes, ...]:
    """Every kind of layer in the order in which they come first, then what is outside of them.

    config: of the whole model. Raises ConfigError where so many ranks cannot share it.
    """
    share_of(config, size)
    prefix = default_prefix(config)
    kinds: dict[tuple[str, str], list[int]] = {}
    for layer, kind in enumerate(zip(config.layer_kinds, config.mlp_kinds, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    found = []
    for (mixer, mlp), layers in kinds.items():
        name = f"{mixer.upper()} + {'MoE' if mlp == 'moe' else mlp}"
        tensors = tuple(_tensors(layer_slots(config, layers[0], prefix), config))
        found.append(KindBytes(name, len(layers), size, tensors))
    outside = tuple(_tensors(model_slots(config, prefix), config))
    return (*found, KindBytes("outside", 1, size, outside))


def _tensors(slots: Slots, config: ModelConfig) -> Iterator[TensorBytes]:
    moe = config.moe
    experts: dict[str, int] = {}
    for slot, spec in slots.items():
        if spec.is_optional:
            continue
        if slot.startswith(("mlp.w1.", "mlp.w2.", "mlp.w3.")):
            kind = slot[: len("mlp.w1")]
            experts[kind] = experts.get(kind, 0) + spec.num_bytes
            continue
        # Without the padding that a released A_log has; a row's embedding is one line of the table.
        whole = spec.num_bytes
        if slot == "attention.a_log":
            whole = whole // math.prod(spec.shape) * config.kda.num_heads
        read = whole // config.vocab_size if slot == "embed" else whole
        yield TensorBytes(slot, cut_of(slot), whole, read)
    for kind, whole in experts.items():
        yield TensorBytes(kind, cut_of(kind), whole, whole // moe.num_experts * moe.top_k)
