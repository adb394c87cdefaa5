"""`make-checkpoint`: seeded random weights in the released layout, scaled as a trained model's are.

Owns the distributions. Every tensor has its own generator, seeded from SHA-256 of (seed, name), and
uses only integer operations and correctly rounded fp32 ones, so the bytes are the same on every
machine and do not depend on what else is written. Knows names only through `roster.py`.

Scales. Projections have a spread of gain / sqrt(fan_in) and two strong directions, so that vectors
of unit RMS keep a size of about one through depth; decays have half-lives that are spread evenly in
log scale from 1 to 1000 tokens; attention-residual scores spread by about 0.35; logits of the head
by about 2.5, and each token has a few successors whose logits it lifts. Routing follows the token,
as it largely does in trained models: an embedding carries the directions of top-k experts, which
every router reads in an order of its own, so that the chosen experts stand clear of the rest; and
one expert more or less is a small part of the residual, so that a rounding that changes a choice
changes little.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.config_checkpoint import CONFIG_FILE
from kdecode.kernels.common.matrix import E2M1_MAGNITUDES
from kdecode.model.building import building
from kdecode.model.mxfp4 import SCALE_BIAS
from kdecode.model.presets import PRESETS, Preset, released_config
from kdecode.model.roster import Slots, TensorSpec, default_prefix, layer_slots, model_slots
from kdecode.model.shards import DTYPES, write_shard
from kdecode.model.weights import INDEX_FILE

# A shard is closed at this size, or after its share of the tensors of a small model.
SHARD_BYTES = 1 << 30
MIN_SHARDS = 3

Progress = Callable[[int, int], None]

# Spread of the output of a projection whose input has unit RMS, by the end of its slot.
_GAINS = {
    "q_b_proj": 1.6,
    "f_b_proj": 0.8,
    "b_proj": 1.5,
    "gate_proj": 1.3,
    "w1": 1.3,
    "up_proj": 1.2,
    "w3": 1.2,
    "lm_head": 2.5,
    "down_proj": 1.0,
    "w2": 0.5,
    "latent_up": 0.15,
    "o_proj": 1.2,
}
# What an embedding adds to the logits of its token's successors, in units of the head's gain.
_SUCCESSORS = (0.6, 0.45, 0.34, 0.25)
# Share of a projection's variance that two strong directions have.
_STRONG_SHARE = 0.1
_HALF_LIFE_DECADES = 3.0
# A plain residual only grows, so that a small embedding would be lost in it.
_EMBED_SPREAD, _PLAIN_EMBED_SPREAD = 0.7, 2.5
# Share of an embedding's variance that its experts' directions have, the router logit that they
# give in an undiluted embedding, and the spread of what a router reads besides.
_ROUTED_SHARE = 0.6
_ROUTED_LOGIT = 5.0
_ROUTER_SPREAD = 0.3
# Spread of the codes of an MXFP4 weight, in units of its scale.
_CODE_SPREAD = 2.0


def make_checkpoint(
    directory: str | Path, preset: str | Preset, seed: int, progress: Progress | None = None
) -> None:
    """Writes config.json, shards, index and tokenizer files; progress(tensors done, of).

    The directory appears whole or not at all. Raises ValueError for an unknown preset and
    FileExistsError for a directory that has anything in it.
    """
    preset = _preset(preset)
    with building(directory) as made:
        _write_all(made, preset, seed, progress)


def _preset(preset: str | Preset) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"The preset is {preset!r}; it must be one of {', '.join(PRESETS)}.")
    return PRESETS[preset]


def _write_all(target: Path, preset: Preset, seed: int, progress: Progress | None) -> None:
    config = ModelConfig.from_checkpoint(released_config(preset))
    slots = _all_slots(config)
    slot_of = {spec.name: (slot, spec) for slot, spec in slots}
    done = 0

    def make(name: str) -> Tensor:
        nonlocal done
        slot, spec = slot_of[name]
        tensor = make_tensor(config, slot, spec, seed)
        done += 1
        if progress is not None:
            progress(done, len(slots))
        return tensor

    for file, specs in _shard_files(slots).items():
        header = {spec.name: (spec.dtype, spec.shape) for spec in specs}
        write_shard(target / file, header, make)
    _write_small(target, preset, seed)


def _write_small(target: Path, preset: Preset, seed: int) -> None:
    """Every file but the shards."""
    from kdecode.model.tokenizer import write_tokenizer

    document = released_config(preset)
    config = ModelConfig.from_checkpoint(document)
    shards = _shard_files(_all_slots(config))
    total_bytes = sum(spec.num_bytes for specs in shards.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in shards.items() for spec in specs}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(target / INDEX_FILE, index)
    write_tokenizer(target, config.vocab_size, seed)
    (target / "generation_config.json").write_text(_generation(config), encoding="utf-8")
    _write_json(target / CONFIG_FILE, document)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _generation(config: ModelConfig) -> str:
    document = {
        "bos_token_id": config.bos_id,
        "do_sample": True,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _all_slots(config: ModelConfig) -> list[tuple[str, TensorSpec]]:
    """(slot, tensor) of the whole checkpoint: embedding, layers, head."""
    prefix = default_prefix(config)
    outside = model_slots(config, prefix)
    layers: list[Slots] = [layer_slots(config, n, prefix) for n in range(config.num_layers)]
    ordered = [("embed", outside.pop("embed"))]
    for slots in layers:
        ordered += [(slot, spec) for slot, spec in slots.items() if not spec.is_optional]
    return ordered + list(outside.items())


def _shard_files(slots: list[tuple[str, TensorSpec]]) -> dict[str, list[TensorSpec]]:
    shards = _split(slots)
    return {
        f"model-{number:05d}-of-{len(shards):06d}.safetensors": specs
        for number, specs in enumerate(shards, start=1)
    }


def _split(slots: list[tuple[str, TensorSpec]]) -> list[list[TensorSpec]]:
    total = sum(spec.num_bytes for _, spec in slots)
    limit = min(SHARD_BYTES, -(-total // MIN_SHARDS))
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for _, spec in slots:
        if used and used + spec.num_bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.num_bytes
    return shards


def make_tensor(config: ModelConfig, slot: str, spec: TensorSpec, seed: int) -> Tensor:
    """One tensor of a checkpoint, a function of the configuration, its name and the seed only."""
    random = _Random(seed, spec.name)
    field = _field(slot)
    if spec.dtype == "U8":
        data: NDArray[Any] = (
            _codes(random, spec) if field == "packed" else _scales(random, slot, spec)
        )
        return torch.from_numpy(data)
    if field in ("a_log", "dt_bias"):
        values = _decay(config, field, spec, seed)
    elif slot.endswith("_conv"):
        values = _conv(random, spec)
    elif len(spec.shape) == 1 and field != "router_bias":
        values = _affine(random, spec, mean=1.0, spread=0.15)
    elif field == "router_bias":
        values = _affine(random, spec, mean=0.0, spread=0.03)
    elif slot.endswith("_mix.proj"):
        values = _affine(random, spec, mean=0.0, spread=0.35 / math.sqrt(spec.shape[-1]))
    elif slot == "embed":
        values = _token_vectors(config, spec.shape[0], seed)
    elif field == "router":
        values = _router(random, config, spec, seed)
    else:
        values = _projection(random, spec, _GAINS.get(field, 1.0))
        if slot == "lm_head":
            values += _successors(config, spec.shape[0], seed)
    return torch.from_numpy(values).to(DTYPES[spec.dtype])


def _field(slot: str) -> str:
    """The last word of a slot that is no expert number: ``mlp.w1.7`` -> ``w1``."""
    return next(part for part in reversed(slot.split(".")) if not part.isdigit())


class _Random:
    """Random numbers of one tensor: 16-bit integers, and normal numbers looked up by them."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._bits = np.random.SFC64(int.from_bytes(digest[:16], "little"))

    def words(self, count: int) -> NDArray[np.uint16]:
        raw = self._bits.random_raw(-(-count // 4))
        return raw.astype("<u8", copy=False).view("<u2")[:count]

    def normal(self, *shape: int) -> NDArray[np.float32]:
        return _normal_table()[self.words(math.prod(shape))].reshape(shape)


@cache
def _normal_table() -> NDArray[np.float32]:
    """65536 equally likely values of a standard normal, on a grid coarse enough to be exact."""
    inverse = NormalDist().inv_cdf
    upper = [round(inverse((i + 0.5) / 65536) * 2048) / 2048 for i in range(32768, 65536)]
    values = np.asarray(upper, dtype=np.float32)
    return np.concatenate([-values[::-1], values])


@cache
def _code_table() -> NDArray[np.uint8]:
    """256 equally likely codes: a normal of spread _CODE_SPREAD, rounded to the nearest code."""
    codes = []
    for value in _normal_table()[128::256].tolist():
        size = abs(value) * _CODE_SPREAD
        nearest = min(range(8), key=lambda code: abs(E2M1_MAGNITUDES[code] - size))
        codes.append(nearest | (8 if value < 0 else 0))
    return np.asarray(codes, dtype=np.uint8)


@cache
def _byte_table() -> NDArray[np.uint8]:
    """65536 equally likely bytes of two independent codes."""
    codes = _code_table()
    high = codes << np.uint8(4)
    table: NDArray[np.uint8] = np.bitwise_or.outer(high, codes).reshape(-1)
    return table


def _codes(random: _Random, spec: TensorSpec) -> NDArray[np.uint8]:
    return _byte_table()[random.words(math.prod(spec.shape))].reshape(spec.shape)


def _scales(random: _Random, slot: str, spec: TensorSpec) -> NDArray[np.uint8]:
    """Scale bytes around the one of the wanted spread: a quarter one lower, a quarter higher."""
    part = slot.split(".")[1]
    spread = _GAINS[part] / math.sqrt(spec.shape[1] * 32)
    base = SCALE_BIAS + round(math.log2(spread / _CODE_SPREAD))
    steps = np.asarray([base - 1, base, base, base + 1], dtype=np.uint8)
    picks = random.words(math.prod(spec.shape)) & np.uint16(3)
    return np.take(steps, picks).reshape(spec.shape)


def _affine(
    random: _Random, spec: TensorSpec, *, mean: float, spread: float
) -> NDArray[np.float32]:
    return random.normal(*spec.shape) * np.float32(spread) + np.float32(mean)


def _projection(random: _Random, spec: TensorSpec, gain: float) -> NDArray[np.float32]:
    """[out, in] with independent entries, rows of uneven size, and two strong directions."""
    rows, cols = spec.shape
    spread = gain / math.sqrt(cols)
    weight = random.normal(rows, cols)
    # Between 0.7 and 1.3: a row's size is a property of the feature it computes.
    row_size = random.words(rows).astype(np.float32) * np.float32(0.6 / 65536) + np.float32(0.7)
    weight *= row_size[:, None] * np.float32(spread * math.sqrt(1 - _STRONG_SHARE))
    strong = spread * math.sqrt(_STRONG_SHARE / 2)
    for _ in range(2):
        left = random.normal(rows, 1) * np.float32(strong)
        weight += left * random.normal(1, cols)
    return weight


def _successors(config: ModelConfig, vocab: int, seed: int) -> NDArray[np.float32]:
    """[vocab, M], added to the head: a token's row has the embeddings of what it may follow."""
    tokens = _token_vectors(config, vocab, seed)
    scale = _GAINS["lm_head"] / math.sqrt(config.hidden_size) / float(np.sqrt(np.mean(tokens**2)))
    rows = np.zeros_like(tokens)
    ids = np.arange(vocab)
    for place, share in enumerate(_SUCCESSORS):
        # A permutation of the vocabulary: the factor has no divisor in common with its size.
        factor = next(n for n in range(7919 * (place + 1), 2**31) if math.gcd(n, vocab) == 1)
        rows += tokens[(ids * factor + place) % vocab] * np.float32(share * scale)
    return rows


def _expert_directions(config: ModelConfig, seed: int) -> NDArray[np.float32]:
    """[E, M], entries of unit spread: what an embedding says about experts."""
    shape = (config.moe.num_experts, config.hidden_size)
    return _Random(seed, "expert directions").normal(*shape)


def _token_vectors(config: ModelConfig, vocab: int, seed: int) -> NDArray[np.float32]:
    """The embedding [vocab, M]: independent entries, and the directions of the token's experts."""
    top_k, num_experts = config.moe.top_k, config.moe.num_experts
    words = _Random(seed, "experts of tokens").words(vocab * num_experts)
    chosen = np.argsort(words.reshape(vocab, num_experts), axis=1, kind="stable")[:, :top_k]
    spread = _PLAIN_EMBED_SPREAD if config.attn_res_block is None else _EMBED_SPREAD
    values = _Random(seed, "tokens").normal(vocab, config.hidden_size)
    values *= np.float32(spread * math.sqrt(1 - _ROUTED_SHARE))
    directions = _expert_directions(config, seed)
    directions *= np.float32(spread * math.sqrt(_ROUTED_SHARE / top_k))
    for place in range(top_k):
        values += directions[chosen[:, place]]
    return values


def _router(
    random: _Random, config: ModelConfig, spec: TensorSpec, seed: int
) -> NDArray[np.float32]:
    """[E, M]: the experts' directions in the layer's own order, and independent entries."""
    num_experts, width = spec.shape
    order = np.argsort(random.words(num_experts), kind="stable")
    # A unit-RMS input has sqrt(share / k) of each of its directions, whose squared length is M.
    gain = _ROUTED_LOGIT / (math.sqrt(_ROUTED_SHARE / config.moe.top_k) * width)
    weight = _expert_directions(config, seed)[order] * np.float32(gain)
    weight += random.normal(num_experts, width) * np.float32(_ROUTER_SPREAD / math.sqrt(width))
    return weight


def _conv(random: _Random, spec: TensorSpec) -> NDArray[np.float32]:
    """[D, 1, W]: the newest tap leads, older ones fade."""
    width = spec.shape[-1]
    fade = np.asarray([0.5 ** (width - 1 - tap) for tap in range(width)], dtype=np.float32)
    return random.normal(*spec.shape) * np.float32(0.3) + fade


def _decay(config: ModelConfig, field: str, spec: TensorSpec, seed: int) -> NDArray[np.float32]:
    """A_log and dt_bias together: at f = 0 a channel's half-life is drawn from 1 to 1000 tokens.

    Values are rounded to 1/1024, so that they do not depend on the machine's logarithm.
    """
    kda = config.kda
    layer_name = spec.name.rsplit(".", 1)[0]
    heads = _Random(seed, f"{layer_name}.decay heads").words(kda.num_heads).tolist()
    # exp(A_log) from 0.5 to 2.
    a_log = [round((word / 65536 * 2 - 1) * math.log(2) * 1024) / 1024 for word in heads]
    if field == "a_log":
        padded = a_log + [0.0] * (math.prod(spec.shape) - len(a_log))
        return np.asarray(padded, dtype=np.float32).reshape(spec.shape)
    words = _Random(seed, f"{layer_name}.decay channels").words(kda.width).tolist()
    bias = []
    for channel, word in enumerate(words):
        half_life = 10 ** (word / 65536 * _HALF_LIFE_DECADES)
        rate = math.log(2) / half_life
        amplitude = math.exp(a_log[channel // kda.head_dim])
        if kda.gate_lower_bound is None:
            z = math.log(math.expm1(rate / amplitude))
        else:
            share = rate / -kda.gate_lower_bound
            z = math.log(share / (1 - share)) / amplitude
        bias.append(round(z * 1024) / 1024)
    return np.asarray(bias, dtype=np.float32).reshape(spec.shape)
