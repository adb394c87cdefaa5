"""Reading a released checkpoint: index, memory-mapped shards, canonical parameters.

Owns the way from files to `model/parameters.py`. Opening a checkpoint reads headers only and checks
everything that they say: every tensor that the configuration asks for is there with an accepted
shape and dtype, no other one is, and the index and the shards agree. Values are checked when a
layer is loaded. `finish` asserts that each tensor was taken exactly once.

Matrices stay views of the mapped files. Small vectors are copied: convolution, A_log, dt_bias,
o_norm and the router's bias to fp32 (exact from bf16), the other norms as they are stored.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.config_json import named, read_json_object, shown
from kdecode.model.mxfp4 import INVALID_SCALES
from kdecode.model.parameters import (
    ExpertWeight,
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
    Mxfp4,
)
from kdecode.model.rank_share import share_of, take
from kdecode.model.roster import (
    LANGUAGE_PREFIX,
    VISION_PREFIXES,
    Slots,
    TensorSpec,
    layer_slots,
    model_slots,
)
from kdecode.model.shards import MAX_HEADER_BYTES, CheckpointError, Shard
from kdecode.parallel.ranks import ALONE, Ranks

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "CheckpointError",
    "CheckpointReader",
    "check_entry",
    "open_shards",
]


class CheckpointReader:
    """A checkpoint directory: ``config``, and loaders that each serve a tensor once.

    ranks: of several, every tensor is this rank's part of it (`rank_share.py`), a view of the file
    where the whole one would be; ``config`` is what one rank has, ``whole`` the checkpoint's own.
    Nothing outside of the parts is read. bytes_taken: of all parts so far.
    """

    def __init__(
        self, directory: str | Path, config: ModelConfig | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.directory = Path(directory)
        self.whole = ModelConfig.from_checkpoint(self.directory) if config is None else config
        self.ranks = ranks
        self.config = share_of(self.whole, ranks.size)
        self._shards, self._shard_of = open_shards(self.directory)
        self._prefix = _name_prefix(self.whole, self._shard_of)
        self._model = model_slots(self.whole, self._prefix)
        self._taken: set[str] = set()
        self.bytes_taken = 0
        self._check_roster()

    def load_embed(self) -> Tensor:
        """[vocab, M]."""
        return self._take(self._model, "embed")

    def load_head(self) -> tuple[MixParameters | None, Tensor, Tensor]:
        """The final mix, the final norm [M] and the output matrix [vocab, M]."""
        mix = self._mix(self._model, "final_mix")
        return mix, self._copy(self._model, "norm"), self._take(self._model, "lm_head")

    def load_layer(self, layer: int) -> LayerParameters:
        """One layer's parameters. Its pages stay resident until `drop`."""
        slots = layer_slots(self.whole, layer, self._prefix)
        is_kda = self.whole.layer_kinds[layer] == "kda"
        is_dense = self.whole.mlp_kinds[layer] == "dense"
        return LayerParameters(
            input_norm=self._copy(slots, "input_norm"),
            post_norm=self._copy(slots, "post_norm"),
            attn_mix=self._mix(slots, "attn_mix"),
            mlp_mix=self._mix(slots, "mlp_mix"),
            attention=self._kda(slots) if is_kda else self._mla(slots),
            mlp=self._gated(slots, "mlp") if is_dense else self._moe(slots),
        )

    def drop(self, layer: int) -> None:
        """Gives the memory of a layer's tensors back; views of them stay valid."""
        slots = layer_slots(self.whole, layer, self._prefix)
        self._drop(spec for spec in slots.values() if spec.name in self._shard_of)

    def drop_outside(self) -> None:
        """`drop` for the embedding and the head."""
        self._drop(self._model.values())

    @contextmanager
    def layer(self, layer: int) -> Iterator[LayerParameters]:
        """A layer's parameters; its pages are given back at the end of the block."""
        try:
            yield self.load_layer(layer)
        finally:
            self.drop(layer)

    def iter_layers(self) -> Iterator[LayerParameters]:
        """Every layer in order, each dropped before the next one is loaded."""
        for number in range(self.whole.num_layers):
            with self.layer(number) as parameters:
                yield parameters

    def load_model(self) -> ModelParameters:
        """The whole model as views of the mapped files; `finish` is included."""
        embed = self.load_embed()
        layers = tuple(self.load_layer(layer) for layer in range(self.whole.num_layers))
        final_mix, norm, lm_head = self.load_head()
        self.finish()
        return ModelParameters(embed, layers, final_mix, norm, lm_head)

    def finish(self) -> None:
        """Raises CheckpointError unless every tensor of the language model has been taken."""
        left = [name for name in self._shard_of if name not in self._taken and not _is_vision(name)]
        if left:
            raise CheckpointError(
                f"{self.directory}: {len(left)} of {len(self._shard_of)} tensors were never read, "
                f"e.g. {', '.join(sorted(left)[:3])}."
            )

    def _check_roster(self) -> None:
        """The headers against the configuration: names, shapes and dtypes."""
        known: set[str] = set()
        # A layer at a time, so that a configuration of more layers than the files have ends here
        # and not in memory for all of its tensors.
        layers = range(self.whole.num_layers)
        parts = (layer_slots(self.whole, layer, self._prefix) for layer in layers)
        for slots in itertools.chain((self._model,), parts):
            for spec in slots.values():
                if spec.name in self._shard_of:
                    check_entry(self._shard_of[spec.name], spec)
                    known.add(spec.name)
                elif not spec.is_optional:
                    raise CheckpointError(
                        f"{self.directory} has no tensor {spec.name}; the configuration asks for "
                        f"{spec.dtype} of shape {list(spec.shape)}."
                    )
        for name, shard in self._shard_of.items():
            if name not in known and not _is_vision(name):
                raise CheckpointError(
                    f"{shard.path}, tensor {named(name)}: the configuration has no such tensor."
                )

    def _take(self, slots: Slots, slot: str) -> Tensor:
        """This rank's part of a tensor."""
        spec = slots[slot]
        if spec.name in self._taken:
            raise CheckpointError(f"Tensor {spec.name} was asked for a second time.")
        self._taken.add(spec.name)
        whole = self._shard_of[spec.name].tensor(spec.name)
        if slot == "attention.a_log":
            # Without its padding.
            whole = whole.view(-1)[: self.whole.kda.num_heads]
        part = take(whole, slot, self.ranks)
        self.bytes_taken += part.numel() * part.element_size()
        return part

    def _copy(self, slots: Slots, slot: str) -> Tensor:
        return self._take(slots, slot).clone()

    def _float(self, slots: Slots, slot: str) -> Tensor:
        return self._take(slots, slot).to(torch.float32, copy=True)

    def _drop(self, specs: Any) -> None:
        names: dict[Shard, list[str]] = defaultdict(list)
        for spec in specs:
            names[self._shard_of[spec.name]].append(spec.name)
        for shard, group in names.items():
            shard.drop(group)

    def _optional(self, slots: Slots, slot: str) -> Tensor | None:
        return self._take(slots, slot) if slot in slots else None

    def _optional_copy(self, slots: Slots, slot: str) -> Tensor | None:
        return self._copy(slots, slot) if slot in slots else None

    def _mix(self, slots: Slots, slot: str) -> MixParameters | None:
        if f"{slot}.norm" not in slots:
            return None
        proj = self._copy(slots, f"{slot}.proj")
        return MixParameters(self._copy(slots, f"{slot}.norm"), proj.view(-1))

    def _gated(self, slots: Slots, slot: str) -> MlpParameters:
        return MlpParameters(
            *(self._take(slots, f"{slot}.{part}") for part in ("gate_proj", "up_proj", "down_proj"))
        )

    def _kda(self, slots: Slots) -> KdaParameters:
        conv = {
            part: self._float(slots, f"attention.{part}_conv").squeeze(1)
            for part in ("q", "k", "v")
        }
        return KdaParameters(
            q_proj=self._take(slots, "attention.q_proj"),
            k_proj=self._take(slots, "attention.k_proj"),
            v_proj=self._take(slots, "attention.v_proj"),
            g_proj=self._optional(slots, "attention.g_proj"),
            g_a_proj=self._optional(slots, "attention.g_a_proj"),
            g_b_proj=self._optional(slots, "attention.g_b_proj"),
            f_a_proj=self._take(slots, "attention.f_a_proj"),
            f_b_proj=self._take(slots, "attention.f_b_proj"),
            b_proj=self._take(slots, "attention.b_proj"),
            q_conv=conv["q"],
            k_conv=conv["k"],
            v_conv=conv["v"],
            a_log=self._float(slots, "attention.a_log"),
            dt_bias=self._float(slots, "attention.dt_bias"),
            o_norm=self._float(slots, "attention.o_norm"),
            o_proj=self._take(slots, "attention.o_proj"),
        )

    def _mla(self, slots: Slots) -> MlaParameters:
        return MlaParameters(
            q_proj=self._optional(slots, "attention.q_proj"),
            q_a_proj=self._optional(slots, "attention.q_a_proj"),
            q_a_norm=self._optional_copy(slots, "attention.q_a_norm"),
            q_b_proj=self._optional(slots, "attention.q_b_proj"),
            kv_a_proj=self._take(slots, "attention.kv_a_proj"),
            kv_a_norm=self._copy(slots, "attention.kv_a_norm"),
            kv_b_proj=self._take(slots, "attention.kv_b_proj"),
            g_proj=self._optional(slots, "attention.g_proj"),
            o_proj=self._take(slots, "attention.o_proj"),
            k_scale=self._cache_scale(slots),
        )

    def has_cache_scale(self, layer: int) -> bool:
        """Whether the checkpoint gives an MLA layer's fp8 cache its scale."""
        slots = layer_slots(self.whole, layer, self._prefix)
        return slots["attention.k_scale"].name in self._shard_of

    def _cache_scale(self, slots: Slots) -> Tensor | None:
        spec = slots["attention.k_scale"]
        if spec.name not in self._shard_of:
            return None
        scale = self._float(slots, "attention.k_scale").view(())
        if not torch.isfinite(scale) or scale <= 0:
            raise CheckpointError(
                f"{self._shard_of[spec.name].path}, tensor {spec.name}: expected a positive scale, "
                f"found {scale.item()}."
            )
        return scale

    def _moe(self, slots: Slots) -> MoeParameters:
        experts = {
            part: tuple(
                self._expert(slots, f"mlp.{part}.{expert}")
                for expert in range(self.whole.moe.num_experts)
            )
            for part in ("w1", "w3", "w2")
        }
        return MoeParameters(
            router=self._take(slots, "mlp.router"),
            router_bias=self._float(slots, "mlp.router_bias"),
            latent_down=self._optional(slots, "mlp.latent_down"),
            latent_norm=self._optional_copy(slots, "mlp.latent_norm"),
            latent_up=self._optional(slots, "mlp.latent_up"),
            shared=self._gated(slots, "mlp.shared") if self.whole.moe.num_shared else None,
            w1=experts["w1"],
            w3=experts["w3"],
            w2=experts["w2"],
        )

    def _expert(self, slots: Slots, slot: str) -> ExpertWeight:
        if slot in slots:
            return self._take(slots, slot)
        spec, scale = slots[f"{slot}.scale"], self._take(slots, f"{slot}.scale")
        low, high = (int(value) for value in torch.aminmax(scale))
        for bad in INVALID_SCALES:
            if bad in (low, high):
                raise CheckpointError(
                    f"{self._shard_of[spec.name].path}, tensor {spec.name}: expected scale bytes "
                    f"from 1 to 254, found {bad}."
                )
        return Mxfp4(self._take(slots, f"{slot}.packed"), scale)


def check_entry(shard: Shard, spec: TensorSpec) -> None:
    """Raises CheckpointError unless the file has the tensor in an accepted shape and dtype."""
    entry = shard.entries[spec.name]
    if entry.shape not in spec.shapes:
        wanted = " or ".join(str(list(shape)) for shape in spec.shapes)
        raise CheckpointError(
            f"{shard.path}, tensor {spec.name}: expected shape {wanted}, found "
            f"{shown(list(entry.shape))}."
        )
    if entry.dtype not in spec.dtypes:
        raise CheckpointError(
            f"{shard.path}, tensor {spec.name}: expected dtype {' or '.join(spec.dtypes)}, "
            f"found {entry.dtype}."
        )


def _is_vision(name: str) -> bool:
    return name.startswith(VISION_PREFIXES)


def _name_prefix(config: ModelConfig, names: dict[str, Shard]) -> str:
    """K3's language model is named inside a multimodal one, or alone when extracted from it."""
    if config.model_type == "kimi_k3" and any(n.startswith(LANGUAGE_PREFIX) for n in names):
        return LANGUAGE_PREFIX
    return ""


def open_shards(directory: Path) -> tuple[tuple[Shard, ...], dict[str, Shard]]:
    """Every shard, and the one of each tensor; the index and the headers must agree."""
    index_path = directory / INDEX_FILE
    if not os.path.lexists(index_path):
        if not os.path.lexists(directory / SINGLE_FILE):
            raise CheckpointError(f"{directory} has neither {INDEX_FILE} nor {SINGLE_FILE}.")
        shard = Shard(directory / SINGLE_FILE)
        return (shard,), dict.fromkeys(shard.entries, shard)
    index = read_json_object(index_path, CheckpointError, MAX_HEADER_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} must have a weight_map from tensors to files.")
    shards: dict[str, Shard] = {}
    shard_of: dict[str, Shard] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index_path}, tensor {named(name)}: expected a file name in the same directory, "
                f"found {shown(file)}."
            )
        if file not in shards:
            if not os.path.lexists(directory / file):
                raise CheckpointError(
                    f"{index_path} places tensor {named(name)} in {named(file)}, which does not "
                    f"exist in {directory}."
                )
            shards[file] = Shard(directory / file)
        if name not in shards[file].entries:
            raise CheckpointError(
                f"{index_path} places tensor {named(name)} in {file}, which has no such tensor."
            )
        shard_of[name] = shards[file]
    for file, shard in shards.items():
        for name in shard.entries:
            if shard_of.get(name) is not shard:
                raise CheckpointError(
                    f"{shard.path}, tensor {named(name)}: the index places it in "
                    f"{weight_map.get(name, 'no file')}, but {file} has it."
                )
    _check_total(index_path, index.get("metadata"), shards.values())
    return tuple(shards.values()), shard_of


def _check_total(path: Path, metadata: object, shards: Iterable[Shard]) -> None:
    """The index's own sum, where it states one: the bytes of all tensors, as the release has it."""
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(entry.end - entry.begin for shard in shards for entry in shard.entries.values())
    if stated is not None and stated != found:
        raise CheckpointError(
            f"{path} states a total_size of {shown(stated)} bytes; the tensors of its files have "
            f"{found}."
        )
