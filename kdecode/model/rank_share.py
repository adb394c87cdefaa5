"""What each of several ranks has of a model: the one table that every share is cut from.

Owns which tensors are divided and how, which values the ranks exchange because of it, and what
cannot be divided. Tensors are known by their slot (`roster.py`) and in canonical form
(`parameters.py`). Knows no files (`weights.py` cuts them with this) and no kernels.

A product whose matrix is cut by rows gives each rank whole columns of the result: those are
gathered where every rank needs all of them, and have the bits of one rank. One whose matrix is cut
by columns gives each rank a part of every sum: those are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP, ConfigError, ModelConfig
from kdecode.model.presets import RELEASES, released_config
from kdecode.parallel.ranks import Ranks

Cut = Literal["whole", "rows", "columns"]
ExchangeKind = Literal["reduce", "gather", "swap"]

# Every tensor of a checkpoint; "mlp.w1" stands for those of all experts, MXFP4 codes and scales
# alike. Rows are heads, a width, a vocabulary, experts or latents: the ranks have equal runs.
_TABLE: dict[str, Cut] = {
    "embed": "rows",
    "lm_head": "rows",
    "norm": "whole",
    "final_mix.norm": "whole",
    "final_mix.proj": "whole",
    "input_norm": "whole",
    "post_norm": "whole",
    "attn_mix.norm": "whole",
    "attn_mix.proj": "whole",
    "mlp_mix.norm": "whole",
    "mlp_mix.proj": "whole",
    # KDA: heads. g_proj is MLA's gate too.
    "attention.q_proj": "rows",
    "attention.k_proj": "rows",
    "attention.v_proj": "rows",
    "attention.g_proj": "rows",
    "attention.g_a_proj": "whole",
    "attention.g_b_proj": "rows",
    "attention.f_a_proj": "whole",
    "attention.f_b_proj": "rows",
    "attention.b_proj": "rows",
    "attention.q_conv": "rows",
    "attention.k_conv": "rows",
    "attention.v_conv": "rows",
    "attention.a_log": "rows",  # without the padding that a checkpoint may have
    "attention.dt_bias": "rows",
    "attention.o_norm": "whole",
    "attention.o_proj": "columns",
    # MLA: heads; what goes into the latent spaces is the same for all of them.
    "attention.q_a_proj": "whole",
    "attention.q_a_norm": "whole",
    "attention.q_b_proj": "rows",
    "attention.kv_a_proj": "whole",
    "attention.kv_a_norm": "whole",
    "attention.kv_b_proj": "rows",
    "attention.k_scale": "whole",
    "mlp.gate_proj": "rows",
    "mlp.up_proj": "rows",
    "mlp.down_proj": "columns",
    "mlp.router": "rows",
    "mlp.router_bias": "whole",  # every rank chooses
    "mlp.latent_down": "rows",
    "mlp.latent_norm": "whole",
    "mlp.latent_up": "rows",
    "mlp.shared.gate_proj": "rows",
    "mlp.shared.up_proj": "rows",
    "mlp.shared.down_proj": "columns",
    "mlp.w1": "rows",
    "mlp.w3": "rows",
    "mlp.w2": "columns",
}
# Rows of these are gathered, so that the configuration of a share has them whole.
GATHERED = frozenset({"mlp.router", "mlp.latent_down", "mlp.latent_up"})
_EXPERT_SLOTS = ("mlp.w1.", "mlp.w2.", "mlp.w3.")
# Of a plain bf16 matrix: the native products read columns in pairs.
_COLUMN_PAIR = 2
# Stages whose value is in the exchange of another one: neither needs the other.
_BESIDE = {"latent_down": "route", "shared_mlp": "experts"}


@dataclass(frozen=True)
class Exchanged:
    """A value of which each rank has a part. row_bytes: what each gives of one row."""

    kind: ExchangeKind
    value: str
    row_bytes: int


def cut_of(slot: str) -> Cut:
    """How a tensor is divided. KeyError for a slot that no model has."""
    return _TABLE[_family(slot)]


def take(tensor: Tensor, slot: str, ranks: Ranks) -> Tensor:
    """A rank's part of a canonical tensor, as a view of it."""
    cut = cut_of(slot)
    if cut == "whole" or ranks.is_alone:
        return tensor
    axis = _axis(cut)
    begin, end = ranks.span(tensor.shape[axis])
    return tensor.narrow(axis, begin, end - begin)


def part_shape(shape: tuple[int, ...], slot: str, size: int) -> tuple[int, ...]:
    """The shape of `take` of a tensor of this shape, of any rank."""
    cut = cut_of(slot)
    if cut == "whole":
        return shape
    axis = _axis(cut)
    return (*shape[:axis], Ranks(0, size).part(shape[axis]), *shape[axis + 1 :])


def join(parts: Sequence[Tensor], slot: str) -> Tensor:
    """The way back from every rank's part, in the order of the ranks."""
    cut = cut_of(slot)
    return parts[0] if cut == "whole" else torch.cat(list(parts), dim=_axis(cut))


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """What one rank of ``size`` has of a model: heads, widths and vocabulary are divided.

    Whole are the model's width, the latent spaces and the number of experts, though the matrices in
    `GATHERED` have only a rank's rows. Raises ConfigError with everything that cannot be divided.
    """
    reasons = refuse_division(config, size)
    if reasons:
        raise ConfigError(" ".join(reasons))
    moe = config.moe
    return replace(
        config,
        vocab_size=config.vocab_size // size,
        dense_width=config.dense_width // size,
        kda=replace(config.kda, num_heads=config.kda.num_heads // size),
        mla=replace(config.mla, num_heads=config.mla.num_heads // size),
        # The width of the shared experts is a multiple of it.
        moe=replace(moe, expert_width=moe.expert_width // size),
    )


def refuse_division(config: ModelConfig, size: int) -> list[str]:
    """Every reason why so many ranks cannot share a model; [] where they can."""
    moe = config.moe
    group = MXFP4_GROUP if moe.expert_format == "mxfp4" else _COLUMN_PAIR
    divided = {
        "KDA heads": (config.kda.num_heads, 1),
        "MLA heads": (config.mla.num_heads, 1),
        "columns of an expert": (moe.expert_width, group),
        "columns of a dense MLP": (config.dense_width, _COLUMN_PAIR),
        "tokens of the vocabulary": (config.vocab_size, 1),
        "experts of a layer, whose router is divided,": (moe.num_experts, 1),
    }
    if moe.latent_width is not None:
        divided["columns of the experts' latent"] = (moe.latent_width, 1)
        divided["columns of the model"] = (config.hidden_size, 1)
    reasons = []
    for what, (total, unit) in divided.items():
        if size > 1 and total % (size * unit):
            groups = f" in groups of {unit}" if unit > 1 else ""
            reasons.append(f"{total} {what} cannot be divided among {size} ranks{groups}.")
    return reasons


def stage_exchange(config: ModelConfig, size: int, stage: str) -> Exchanged | None:
    """What the ranks exchange at the end of a stage; None where nothing is.

    config: of a share. Parts of sums are fp32, columns are in the dtype of the value.
    """
    width, moe = config.hidden_size, config.moe
    side = moe.latent_width or width
    found: dict[str, tuple[ExchangeKind, str, int]] = {
        "embed": ("reduce", "prefix", 4 * width),
        "attn_out_proj": ("reduce", "attn_delta", 4 * width),
        "dense_mlp": ("reduce", "mlp_delta", 4 * width),
        "route": ("gather", "router_logits", 4 * moe.num_experts // size),
        "latent_down": ("gather", "latent", 2 * side // size),
        "experts": ("reduce", "expert_sum", 4 * side),
        "latent_up": ("gather", "routed", 2 * width // size),
        "shared_mlp": ("reduce", "shared", 4 * width),
        "head": ("gather", "logits", 2 * config.vocab_size),
    }
    return Exchanged(*found[stage]) if size > 1 and stage in found else None


def covered_exchanges(
    config: ModelConfig, size: int, covers: Sequence[str]
) -> tuple[tuple[Exchanged, ...], ...]:
    """What the ranks exchange in a step that covers these stages, an exchange each, in order.

    config: of a share.
    """
    exchanges: dict[str, tuple[Exchanged, ...]] = {}
    for stage in covers:
        value = stage_exchange(config, size, stage)
        if value is not None:
            first = _BESIDE.get(stage, stage)
            exchanges[first] = (*exchanges.get(first, ()), value)
    return tuple(exchanges.values())


def context_exchanges(
    config: ModelConfig, size: int, stats: int
) -> tuple[tuple[Exchanged, ...], ...]:
    """What ranks that share the positions of a context exchange in the attention of a row.

    Queries go to all ranks, and what is found for its heads comes back to each: sums, and so many
    statistics of their weights. config: of a share.
    """
    mla = config.mla
    queries = Exchanged("gather", "mla_query", 2 * mla.num_heads * mla.cache_width)
    lanes = mla.num_heads * size
    sums = Exchanged("swap", "mla_sums", 4 * lanes * mla.kv_rank)
    return (queries,), (sums, Exchanged("swap", "mla_stats", 4 * lanes * stats))


def release_config(name: str, num_layers: int) -> ModelConfig:
    """The first ``num_layers`` layers of a release. Raises ConfigError."""
    config = ModelConfig.from_checkpoint(released_config(RELEASES[name]))
    # Both kinds of attention, so that there is a cache of each kind.
    fewest = config.layer_kinds.index("mla") + 1
    if not fewest <= num_layers <= config.num_layers:
        raise ConfigError(
            f"{num_layers} layers of {name}; it must be from {fewest} to {config.num_layers}."
        )
    return replace(
        config,
        layer_kinds=config.layer_kinds[:num_layers],
        mlp_kinds=config.mlp_kinds[:num_layers],
    )


def _family(slot: str) -> str:
    """The entry of the table: experts share theirs."""
    return slot[: len("mlp.w1")] if slot.startswith(_EXPERT_SLOTS) else slot


def _axis(cut: Cut) -> int:
    return 1 if cut == "columns" else 0
