"""Trained parameters as a checkpoint in the released layout, and back.

Owns the way from slots to tensors: trunk in bf16, experts packed to MXFP4, biases and decays in
fp32. Names, shapes and dtypes are `kdecode.model.roster`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3train.target import is_expert, slot_shapes
from kdecode.config import ModelConfig
from kdecode.config_checkpoint import CONFIG_FILE
from kdecode.config_draft import DraftConfig
from kdecode.model.draft_roster import draft_slots
from kdecode.model.mxfp4 import dequantise, pack
from kdecode.model.parameters import Mxfp4
from kdecode.model.roster import TensorSpec, default_prefix, layer_slots, model_slots
from kdecode.model.shards import DTYPES, write_shard
from kdecode.model.tokenizer import save_tokens
from kdecode.model.weights import INDEX_FILE, SINGLE_FILE, CheckpointReader


def export_target(
    directory: Path,
    document: dict[str, Any],
    state: dict[str, Tensor],
    base_tokens: list[bytes],
    generation: dict[str, Any],
) -> None:
    """config.json, one shard and its index, and the tokenizer's files. document: config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_checkpoint(document)
    prefix = default_prefix(config)
    specs = dict(model_slots(config, prefix))
    for layer in range(config.num_layers):
        slots = layer_slots(config, layer, prefix)
        specs |= {f"layers.{layer}.{slot}": spec for slot, spec in slots.items()}
    kept = {slot: spec for slot, spec in specs.items() if not spec.is_optional}
    packed = {
        f"{slot}.{expert}": pack(weight.float())
        for slot, stack in state.items()
        if is_expert(slot)
        for expert, weight in enumerate(stack)
    }
    file = "model-00001-of-000001.safetensors"
    total = write_tensors(directory / file, kept, state, packed)
    weight_map = {spec.name: file for spec in kept.values()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / INDEX_FILE, index)
    save_tokens(directory, base_tokens)
    _write_json(directory / "generation_config.json", generation)
    _write_json(directory / CONFIG_FILE, document)


def load_target(directory: Path) -> dict[str, Tensor]:
    """fp32 parameters by slot, as `export_target` rounded them."""
    reader = CheckpointReader(directory)
    model = reader.load_model()
    state = {}
    for slot, shape in slot_shapes(reader.config).items():
        value: Any = model
        for part in slot.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        if is_expert(slot):
            value = torch.stack([dequantise(expert) for expert in value])
        state[slot] = value.float().view(shape).clone()
    return state


def export_draft(directory: Path, document: dict[str, Any], state: dict[str, Tensor]) -> None:
    """config.json and one file; embedding and head are the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    slots = draft_slots(DraftConfig.from_checkpoint(document))
    kept = {slot: spec for slot, spec in slots.items() if not spec.is_optional}
    write_tensors(directory / SINGLE_FILE, kept, state)
    _write_json(directory / CONFIG_FILE, document)


def write_tensors(
    path: Path,
    specs: dict[str, TensorSpec],
    state: dict[str, Tensor],
    packed: dict[str, Mxfp4] | None = None,
) -> int:
    """One file of tensors by slot; -> its bytes of data."""
    slot_of = {spec.name: slot for slot, spec in specs.items()}
    header = {spec.name: (spec.dtype, spec.shape) for spec in specs.values()}

    def tensor(name: str) -> Tensor:
        slot = slot_of[name]
        expert, _, part = slot.rpartition(".")
        if packed is not None and expert in packed:
            return packed[expert].packed if part == "packed" else packed[expert].scale
        return _as_released(state[slot], specs[slot])

    return write_shard(path, header, tensor)


def _as_released(value: Tensor, spec: TensorSpec) -> Tensor:
    value = value.detach().to(DTYPES[spec.dtype])
    missing = torch.Size(spec.shape).numel() - value.numel()
    if missing:
        # Only a_log is longer in the file than in the model.
        value = torch.cat([value, value.new_zeros(missing)])
    return value.view(spec.shape)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
