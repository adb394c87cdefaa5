"""CUDA's steps of `latency_specialized` on one of several ranks, a GPU each.

The launches of one rank (`latency_cuda`), where a product is whole on each; where it is not, a
launch that leaves this rank's part, an exchange, and a launch that makes the value whole. A layer
has an exchange behind its attention and behind a dense MLP, and three in a mixture of experts:
router and latents, the sums of the experts, and the columns of what comes back from the latents.
Where the ranks signal each other (`Deployment.signals_peers`) no step is an exchange: the first of
the two launches signals, the second one waits, and that of the router makes its values whole by
itself. Owns that list and where the parts lie. Does not know what moves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kdecode.config import ModelConfig
from kdecode.decode.cuda_use import Stages, Use, attention, layer_use, mix, project
from kdecode.decode.deployment import Deployment
from kdecode.decode.plan import Buffer, cannot_run
from kdecode.kernels import table
from kdecode.kernels.common import mix_norm
from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.common.peer_table import table_words
from kdecode.kernels.common.rank_parts import Part, Place, offsets, parts_of
from kdecode.kernels.contract import Buffers, DeviceExchange, PartBlock
from kdecode.kernels.exchange.op import ExchangeUse, contract_of
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.kernels.rank_join.op import JoinUse
from kdecode.kernels.rank_join.op import contract_at as join_contract
from kdecode.kernels.rank_whole.op import WholeUse
from kdecode.kernels.rank_whole.op import contract_at as whole_contract
from kdecode.model.layout import PackedMlp, PackedModel, PackedMoe
from kdecode.model.rank_share import Exchanged
from kdecode.model.stages import layer_stages
from kdecode.parallel.ranks import Ranks

# Beside those of one rank.
OPS = ("embed_part", "projection_part", "rank_join", "rank_whole")

# What follows an exchange: the kind of block, and its layer.
Block = tuple[mix_norm.Place, int | None]


def part_buffers(config: ModelConfig, rows: int, ranks: Ranks) -> tuple[Buffer, ...]:
    """What the steps of a rank leave for the others; nothing on one that is alone."""
    if ranks.is_alone:
        return ()
    parts = [part for each in parts_of(config, ranks.size).values() for part in each]
    return tuple(Buffer(part.buffer, (rows, part.width), part.dtype) for part in parts)


def more_buffers(config: ModelConfig, rows: int, ranks: Ranks) -> tuple[Buffer, ...]:
    """Values of several ranks that one keeps in registers: the norm of the experts' sums."""
    moe = config.moe
    has_norm = "moe" in config.mlp_kinds and moe.latent_width is not None and moe.has_latent_norm
    if ranks.is_alone or not has_norm:
        return ()
    return (Buffer("expert_normed", (rows, moe.latent_width or 0), torch.bfloat16),)


def lay_out(deployment: Deployment, rows: int, buffers: Buffers) -> None:
    """Puts the parts of several ranks into the blocks that their exchange moves."""
    if deployment.shared is None and deployment.place != "meta":
        raise ValueError("A plan of several ranks runs with what they exchange values through.")
    config, size = deployment.config, deployment.ranks.size
    exchange: DeviceExchange = deployment.shared or NoExchange(
        size, deployment.place, "symmetric" if deployment.signals_peers else "nccl"
    )
    blocks: dict[str, PartBlock] = {}
    for place, parts in parts_of(config, size).items():
        begins, total = offsets(parts, rows)
        block = blocks[place] = exchange.block(place, total)
        for part in parts:
            begin, shape = begins[part.buffer], (rows, part.width)
            end = begin + rows * part.width * part.dtype.itemsize
            buffers[part.buffer] = block.part[begin:end].view(part.dtype).view(shape)
    buffers.blocks = blocks


@dataclass(frozen=True)
class NoExchange:
    """A `DeviceExchange` of a plan that is only compiled: its exchanges cannot run."""

    size: int
    device: str
    transport: str

    def block(self, name: str, num_bytes: int) -> PartBlock:
        part = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        sources = self._numbers(self.size)
        if self.transport == "nccl":
            return PartBlock(part, sources, cannot_run)
        return PartBlock(part, sources, None, self._numbers(table_words(self.size)))

    def _numbers(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device=self.device)


def uses(packed: PackedModel, ranks: Ranks, *, signals_peers: bool) -> Iterator[Use]:
    """Every step of a plan, in order. signals_peers: see `Deployment`."""
    made = _Uses(packed, ranks.size, signals_peers)
    yield from made.embed()
    for layer in range(packed.config.num_layers):
        yield from made.layer(layer)
    yield from made.head()


class _Uses:
    def __init__(self, packed: PackedModel, size: int, signals_peers: bool) -> None:
        self.packed, self.config = packed, packed.config
        self.parts = parts_of(packed.config, size)
        self.signals_peers = signals_peers

    def embed(self) -> Iterator[Use]:
        table_of = self.packed.embed
        row_bytes = table_of.shape[1] * table_of.element_size()
        yield Use(table.contract("embed_part"), None, table_of, (), more_bytes=row_bytes)
        yield from self._exchanged("embed", None)
        yield self._joined("embed", None, ("attn", 0))

    def layer(self, layer: int) -> Iterator[Use]:
        config, entry = self.config, self.packed.layers[layer]
        is_last = layer + 1 == config.num_layers
        following: Block = ("final", None) if is_last else ("attn", layer + 1)
        yield from attention(config, layer, entry)
        yield self._part(layer, entry.attention.o_proj, ("attn_out", "attn_part"))
        yield from self._exchanged("attn", layer)
        yield self._joined("attn", layer, ("mlp", layer))
        if isinstance(entry.mlp, PackedMlp):
            yield layer_use(config, "dense_up", layer, entry, (entry.mlp.gate_up,))
            yield self._part(layer, entry.mlp.down, ("dense_product", "mlp_part"))
            yield from self._exchanged("mlp", layer)
            yield self._joined("mlp", layer, following)
        else:
            yield from self._mixture(layer, entry.mlp)
            yield self._joined("routed", layer, following)

    def _mixture(self, layer: int, moe: PackedMoe) -> Iterator[Use]:
        config, entry = self.config, self.packed.layers[layer]
        shared, expert, count = moe.shared, moe.experts[0], config.moe.top_k
        gate_up = None if shared is None else shared.gate_up
        gate = layer_use(config, "moe_gate", layer, entry, (moe.router, moe.latent_down, gate_up))
        parts = tuple(part.buffer for part in self.parts["gate"])
        if self.signals_peers:
            contract = replace(gate.contract, writes=(*parts, *gate.contract.writes))
            yield replace(gate, contract=contract, exchanges=self._inside("gate"))
        else:
            contract = replace(gate.contract, covers=(), writes=(*parts, "shared_product"))
            yield replace(gate, contract=contract, stages=())
            yield from self._exchanged("gate", layer)
            yield self._whole("gate", layer, moe)
        yield layer_use(config, "expert_up", layer, entry, (expert.gate_up,) * count)
        matrices = (*(expert.down,) * count, None if shared is None else shared.down)
        down = layer_use(config, "expert_down", layer, entry, matrices)
        contract = replace(
            down.contract,
            covers=(),
            reads=(*down.contract.reads, "shared_product"),
            writes=tuple(part.buffer for part in self.parts["experts"]),
        )
        yield replace(down, contract=contract, stages=())
        yield from self._exchanged("experts", layer)
        yield self._whole("experts", layer, moe)
        if moe.latent_up is not None:
            source = "expert_sum" if moe.latent_norm is None else "expert_normed"
            yield self._part(layer, moe.latent_up, (source, "routed_part"), is_sum=False)
        yield from self._exchanged("routed", layer)

    def head(self) -> Iterator[Use]:
        yield self._part(None, self.packed.head, ("head_in", "logits_part"), is_sum=False)
        yield from self._exchanged("head", None)
        yield self._whole("head", None)

    def _part(
        self, layer: int | None, matrix: Any, names: tuple[str, str], *, is_sum: bool = True
    ) -> Use:
        """A product that is a part: of every sum, or some columns."""
        use = project(layer, "", matrix, names)
        contract = replace(use.contract, name="projection_part", covers=())
        weights = ProjectionWeights(matrix, *names, exchange="reduce" if is_sum else "gather")
        return replace(use, contract=contract, weights=weights, stages=())

    def _exchanged(self, place: Place, layer: int | None) -> Iterator[Use]:
        """The exchange at a place, where it is a step."""
        parts = self.parts.get(place, ())
        if parts and not self.signals_peers:
            yield Use(contract_of(parts), layer, ExchangeUse(place), (), exchanges=_values(parts))

    def _inside(self, place: Place) -> tuple[tuple[Exchanged, ...], ...]:
        """The exchange of a step that reads the other ranks' memory."""
        return _values(self.parts.get(place, ())) if self.signals_peers else ()

    def _whole(self, place: Place, layer: int | None, weights: Any = None) -> Use:
        """What makes the values of a place whole."""
        contract = whole_contract(place)
        stages = self._present(layer, contract.covers)
        inside = self._inside(place)
        return Use(contract, layer, WholeUse(place, weights), stages, exchanges=inside)

    def _joined(self, place: Place, layer: int | None, following: Block) -> Use:
        """The end of a block, with the mix and norm of the next one."""
        then = mix(self.packed, *following)
        contract = join_contract(place, following[0])
        stages = self._present(layer, contract.covers[: -len(then.stages)])
        weights: MixNorm = then.weights
        # Snapshots are read where one existed before, and written where one is pushed.
        has_older = weights.num_snapshots > weights.is_pushed
        contract = replace(
            contract,
            reads=tuple(name for name in contract.reads if name != "snapshots" or has_older),
            writes=tuple(
                name for name in contract.writes if name != "snapshots" or weights.is_pushed
            ),
        )
        stages = (*stages, *then.stages)
        inside = self._inside(place)
        return Use(contract, layer, JoinUse(place, weights), stages, exchanges=inside)

    def _present(self, layer: int | None, covers: tuple[str, ...]) -> Stages:
        """Those of the stages that the model has."""
        present = covers if layer is None else layer_stages(self.config, layer)
        return tuple((layer, stage) for stage in covers if stage in present)


def _values(parts: tuple[Part, ...]) -> tuple[tuple[Exchanged, ...], ...]:
    """One exchange of these; none of no parts."""
    return (tuple(_exchanged(part) for part in parts),) if parts else ()


def _exchanged(part: Part) -> Exchanged:
    is_sum = part.dtype == torch.float32 and part.value != "router_logits"
    row_bytes = part.width * part.dtype.itemsize
    return Exchanged("reduce" if is_sum else "gather", part.value, row_bytes)
