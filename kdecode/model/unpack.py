"""Packed weights back to canonical form, by field of `parameters.py`: the inverse of `layout.py`.

Exact: the bits that were read. What packing folds together (decay, residual mixes) does not come
back. For tests and tools; nothing that runs a model needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.matrix import Matrix, to_mxfp4, to_rows
from kdecode.model.layout import PackedKda, PackedMla, PackedMlp
from kdecode.model.parameters import ExpertWeight, Mxfp4


def unpack_gated(mlp: PackedMlp) -> tuple[ExpertWeight, ExpertWeight, ExpertWeight]:
    """Gate, up and down in canonical form."""
    gate_up = mlp.gate_up
    if gate_up.format == "mxfp4_rows":
        codes, scales = to_mxfp4(gate_up)
        half = gate_up.rows // 2
        gate, up = (Mxfp4(codes[part], scales[part]) for part in (slice(half), slice(half, None)))
        return gate, up, _canonical(mlp.down)
    if gate_up.format == "rows":
        rows = to_rows(gate_up)
        return rows[: gate_up.rows // 2], rows[gate_up.rows // 2 :], to_rows(mlp.down)
    halves = (
        replace(
            gate_up,
            rows=gate_up.rows // 2,
            data=gate_up.data[first::2],
            scales=None if gate_up.scales is None else gate_up.scales[first::2],
        )
        for first in (0, 1)
    )
    gate, up = (_canonical(half) for half in halves)
    return gate, up, _canonical(mlp.down)


def unpack_kda(config: ModelConfig, kda: PackedKda) -> dict[str, Tensor]:
    """The matrices and the convolution in canonical form, by field of `KdaParameters`."""
    width, rank, heads = config.kda.width, config.kda.head_dim, config.kda.num_heads
    gate = width if config.kda.is_gate_full_rank else rank
    names = ("q_proj", "k_proj", "v_proj", "", "f_a_proj", "b_proj")
    parts = _split(kda.in_proj, [width, width, width, gate, rank, heads])
    made = dict(zip(names, parts, strict=True))
    made["g_proj" if kda.g_b is None else "g_a_proj"] = made.pop("")
    if kda.g_b is not None:
        made["g_b_proj"] = to_rows(kda.g_b)
    made |= {"f_b_proj": to_rows(kda.f_b), "o_proj": to_rows(kda.o_proj)}
    for name, conv in zip(("q_conv", "k_conv", "v_conv"), kda.conv.t().chunk(3), strict=True):
        made[name] = conv.contiguous()
    return made


def unpack_mla(config: ModelConfig, mla: PackedMla) -> dict[str, Tensor]:
    """The matrices in canonical form, by field of `MlaParameters`."""
    c = config.mla
    gate = c.num_heads * c.v_dim if c.has_output_gate else 0
    sizes = [mla.in_proj.rows - c.cache_width - gate, c.cache_width, gate]
    query, kv_a, g_proj = _split(mla.in_proj, sizes)
    w_uk = to_rows(mla.w_uk).view(c.num_heads, c.kv_rank, c.nope_dim).transpose(1, 2)
    w_uv = to_rows(mla.w_uv).view(c.num_heads, c.v_dim, c.kv_rank)
    made = {
        "q_proj" if mla.q_b is None else "q_a_proj": query,
        "kv_a_proj": kv_a,
        "kv_b_proj": torch.cat([w_uk, w_uv], dim=1).view(-1, c.kv_rank),
        "o_proj": to_rows(mla.o_proj),
    }
    if mla.q_b is not None:
        made["q_b_proj"] = to_rows(mla.q_b)
    if gate:
        made["g_proj"] = g_proj
    return made


def _split(matrix: Matrix, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive rows."""
    rows, parts, start = to_rows(matrix), [], 0
    for size in sizes:
        parts.append(rows[start : start + size])
        start += size
    return parts


def _canonical(matrix: Matrix) -> ExpertWeight:
    is_coded = matrix.format in ("mxfp4_tiles", "mxfp4_rows")
    return Mxfp4(*to_mxfp4(matrix)) if is_coded else to_rows(matrix)
