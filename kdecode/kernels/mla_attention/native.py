"""Attention of a prompt's rows over expanded keys and values, native, in torch's OpenMP threads."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import TILE_ROWS


def takes(mla: MlaConfig) -> bool:
    """Whether heads of these sizes are whole vectors of every instruction set, and fit."""
    sizes = (mla.nope_dim, mla.rope_dim, mla.v_dim)
    widest = max(mla.qk_dim, mla.v_dim)
    return all(size and size % TILE_ROWS == 0 for size in sizes) and widest <= int(
        _native.MAX_PROMPT_WIDTH
    )


def prompt_attention(
    query: Tensor, keys: Tensor, rest: Tensor, values: Tensor, scale: float, isa: str | None = None
) -> Tensor:
    """Causal attention of the last T of C tokens -> [T, H, V] bf16; softmax and sums in fp32.

    query [T, H, N + R]; keys [C, H, N]; rest [C, R], which all heads' keys end with; values
    [C, H, V]: bf16, rows at any distance. isa: instruction set; None is the best. A block of
    queries is one thread's, so nothing depends on their number.
    """
    tokens, heads, width = query.shape
    nope, rope, v_dim = keys.shape[2], rest.shape[1], values.shape[2]
    context = keys.shape[0]
    if width != nope + rope or not rest.shape[0] == values.shape[0] == context >= tokens:
        raise ValueError(
            f"Attention of {list(query.shape)} queries over {list(keys.shape)} keys, "
            f"{list(rest.shape)} rests and {list(values.shape)} values: a query is as wide as a "
            "key and a rest, and the queries are the last of the tokens."
        )
    for name, tensor in (("query", query), ("keys", keys), ("rest", rest), ("values", values)):
        _check_rows(name, tensor)
    out = torch.empty(tokens, heads, v_dim, dtype=torch.bfloat16)
    args = _native.PromptAttentionArgs()
    args.query, args.query_step = query.data_ptr(), query.stride(0)
    args.keys, args.keys_step = keys.data_ptr(), keys.stride(0)
    args.rest, args.rest_step = rest.data_ptr(), rest.stride(0)
    args.values, args.values_step = values.data_ptr(), values.stride(0)
    args.out, args.out_step = out.data_ptr(), out.stride(0)
    args.tokens, args.start, args.heads = tokens, context - tokens, heads
    args.nope_dim, args.rope_dim, args.v_dim = nope, rope, v_dim
    args.scale = scale
    _native.prompt_attention(isa or _native.detect_isa(), args)
    return out


def _check_rows(name: str, tensor: Tensor) -> None:
    """The numbers of one row have to follow each other."""
    is_packed = tensor[0].is_contiguous() if tensor.shape[0] else True
    if tensor.device.type != "cpu" or tensor.dtype != torch.bfloat16 or not is_packed:
        raise ValueError(
            f"Native attention takes rows of bf16 on a CPU; {name} is {tensor.dtype} on "
            f"{tensor.device} with strides {list(tensor.stride())}."
        )
