"""What the preparation of several native ops has in common: limits, the prologue's fields, checks.

Owns the limits that native.h, residual.h and exchange.h state. Knows no op; weights are duck-typed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kdecode.config import Activation, ModelConfig
from kdecode.kernels.common.matrix import TILE_ROWS, Matrix
from kdecode.kernels.common.native import MAX_ROWS, Tiles, ptr, tiles
from kdecode.kernels.contract import Buffers, Problem

MAX_SNAPSHOTS = 63
MAX_TOP_K = 64
MAX_EXPERTS = 4096
MAX_RANKS = 64
# Of `behind` in exchange.h.
LINE_BYTES = 64


def refuse_device(problem: Problem) -> list[str]:
    """Reasons that concern the device."""
    if problem.device == "cpu":
        return []
    return [f"The native kernels run on the cpu; the device is {problem.device}."]


def refuse_rows(problem: Problem) -> list[str]:
    """Reasons that concern the number of rows."""
    if problem.rows is None:
        return [
            "The native steps are built for a fixed number of rows; this plan takes any number."
        ]
    if not 1 <= problem.rows <= MAX_ROWS:
        return [f"The native steps take 1 to {MAX_ROWS} rows; this plan has {problem.rows}."]
    return []


def step_rows(problem: Problem) -> int:
    """The rows of a step that has been accepted; ValueError for a plan of any number of rows."""
    reasons = refuse_rows(problem)
    if problem.rows is None or reasons:
        raise ValueError(" ".join(reasons))
    return problem.rows


def refuse_mix_norm(config: ModelConfig) -> list[str]:
    """Reasons that concern the residual mix and the products that read its norm."""
    reasons = []
    if config.num_snapshots > MAX_SNAPSHOTS:
        reasons.append(
            f"The native residual mix takes up to {MAX_SNAPSHOTS} snapshots; "
            f"the model has {config.num_snapshots}."
        )
    if config.hidden_size % 2:
        reasons.append(
            f"Native tiles hold pairs of columns; the model width {config.hidden_size} is odd."
        )
    return reasons


def refuse_gated_width(what: str, width: int) -> list[str]:
    """Reasons that concern the width of a gated product, whose tiles alternate gate and up."""
    if width % TILE_ROWS == 0:
        return []
    return [f"{what} must be a multiple of {TILE_ROWS}; it is {width}."]


def set_mix_norm(
    args: Any,
    problem: Problem,
    buffers: Buffers,
    *,
    mix_weight: torch.Tensor | None,
    norm_weight: torch.Tensor,
    outputs: tuple[str, str],
    num_snapshots: int,
) -> list[torch.Tensor]:
    """Fills the fields of residual.h's `MixNorm`; returns the tensors that must stay alive.

    outputs: names of the mix and norm buffers. num_snapshots: those that exist at this point.
    """
    config, rows = problem.config, step_rows(problem)
    width = config.hidden_size
    args.rows, args.width, args.eps = rows, width, config.rms_eps
    args.prefix = ptr(buffers["prefix"], torch.bfloat16, (rows, width))
    args.norm_weight = ptr(norm_weight, torch.float32, (width,))
    args.mix_out = ptr(buffers[outputs[0]], torch.bfloat16, (rows, width))
    args.norm_out = ptr(buffers[outputs[1]], torch.bfloat16, (rows, width))
    used = [buffers["prefix"], norm_weight, buffers[outputs[0]], buffers[outputs[1]]]
    if mix_weight is not None:
        shape = (config.num_snapshots, rows, width)
        args.mix_weight = ptr(mix_weight, torch.float32, (width,))
        args.snapshots = ptr(buffers["snapshots"], torch.bfloat16, shape)
        args.num_snapshots = num_snapshots
        used += [mix_weight, buffers["snapshots"]]
    return used


def set_attn_mix_norm(
    args: Any, problem: Problem, weights: Any, buffers: Buffers
) -> list[torch.Tensor]:
    """`set_mix_norm` of an attention block. weights: a `PackedLayer`."""
    assert problem.layer is not None
    return set_mix_norm(
        args,
        problem,
        buffers,
        mix_weight=weights.attn_mix,
        norm_weight=weights.input_norm,
        outputs=("attn_mix", "attn_in"),
        num_snapshots=problem.config.snapshots_before(problem.layer),
    )


def set_mlp_mix_norm(
    args: Any, problem: Problem, weights: Any, buffers: Buffers
) -> list[torch.Tensor]:
    """`set_mix_norm` of an MLP block. weights: a `PackedLayer`."""
    assert problem.layer is not None
    return set_mix_norm(
        args,
        problem,
        buffers,
        mix_weight=weights.mlp_mix,
        norm_weight=weights.post_norm,
        outputs=("mlp_mix", "mlp_in"),
        num_snapshots=problem.config.snapshots_before(problem.layer + 1),
    )


def set_activation(args: Any, activation: Activation) -> None:
    """Fills the fields of tile_ops.h's `Activation`."""
    args.is_situ = activation.kind == "situ"
    if args.is_situ:
        if activation.beta is None or activation.linear_beta is None:
            raise ValueError(f"SiTU needs both of its bounds; the configuration has {activation}.")
        args.beta, args.linear_beta = activation.beta, activation.linear_beta


def refuse_parts(problem: Problem, **totals: int) -> list[str]:
    """Reasons that concern what the ranks divide. totals: by what it is, in words and with _."""
    size = problem.ranks.size
    return [
        f"{total} {what.replace('_', ' ')} cannot be divided among {size} ranks."
        for what, total in totals.items()
        if total % size
    ]


def set_exchange(args: Any, problem: Problem, buffers: Buffers, *array_bytes: int) -> None:
    """Fills the field of exchange.h of a step of several ranks; there is none of one.

    array_bytes: of the arrays that a rank's part has in the step's largest exchange. Raises
    ValueError where there is nothing to exchange through, or no room in it.
    """
    if problem.ranks.is_alone:
        return
    shared = buffers.shared
    if shared is None:
        raise ValueError(
            f"A step of {problem.ranks.size} ranks runs with what they exchange values through."
        )
    size = part_bytes(array_bytes)
    if size > shared.part_bytes:
        raise ValueError(
            f"A step gives a part of {size} bytes to the other ranks; those of the exchange have "
            f"up to {shared.part_bytes}."
        )
    args.exchange = shared


def part_bytes(array_bytes: Iterable[int]) -> int:
    """Bytes of a part of these arrays, each of which begins on a cache line of its own."""
    return sum(-(-size // LINE_BYTES) * LINE_BYTES for size in array_bytes)


def tiles_of(what: str, matrix: Matrix, rows: int, cols: int) -> Tiles:
    """The native view of a packed matrix, after a check of its size."""
    if (matrix.rows, matrix.cols) != (rows, cols):
        raise ValueError(
            f"{what} is [{matrix.rows}, {matrix.cols}]; "
            f"the configuration asks for [{rows}, {cols}]."
        )
    return tiles(matrix)
