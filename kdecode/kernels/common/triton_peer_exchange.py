"""Exchanges of the standard forward between ranks that read each other's memory: their launches.

A rank leaves what it gives in its block, and the last program signals. What is taken waits for all
ranks and reads their blocks where they are: side by side, or added in the order of the ranks,
rounded once. A sum that is handed on goes to this rank's next block and is signalled like any part.
Numbers are moved as the words that they are stored in. Knows no sizes of blocks and no order of
exchanges (`parallel/symmetric.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import to_bf16
from kdecode.kernels.common.triton_peers import peers_of, signal_if_last, wait_for_peers
from kdecode.kernels.contract import PartBlock

_BLOCK = 2048


def give_launch(words: Tensor, block: PartBlock, counter: Tensor) -> Launch:
    """words: of any kind, in one line, no more than the block has room for. counter: int32 [1], 0,
    as it is again behind the launch."""
    peers, size = peers_of(block)
    arguments = {
        "words": tensor_for(words, words.dtype, (words.numel(),), name="what is given"),
        "part": _words_of(block, words.dtype, words.numel()),
        "counter": counter,
        "peers": peers,
        "numbers": words.numel(),
    }
    return _launch(give, words.numel(), (), arguments, {"PEERS": size})


def take_launch(
    block: PartBlock, first: int, numbers: int, out: Tensor, begin: int, stride: int
) -> Launch:
    """Of every rank's block ``numbers`` words from ``first`` on; rank q's go to word begin + q *
    stride of ``out``, which is one line. What would be behind its end is left out."""
    peers, size = peers_of(block)
    arguments = {
        "sources": block.sources,
        "out": tensor_for(out, out.dtype, (out.numel(),), name="what is taken"),
        "peers": peers,
        "first": first,
        "numbers": numbers,
        "begin": begin,
        "stride": stride,
        "end": out.numel(),
    }
    return _launch(take, numbers, (size,), arguments, {"PEERS": size})


def sum_launch(block: PartBlock, first: int, out: Tensor) -> Launch:
    """fp32 of every rank's block from number ``first`` on, added: bf16 ``out``, in one line."""
    peers, size = peers_of(block)
    out = tensor_for(out, torch.bfloat16, (out.numel(),), name="the sum")
    arguments = {
        "sources": block.sources,
        "out": out,
        "counter": block.sources,  # nobody is told
        "peers": peers,
        "others": peers,
        "first": first,
        "numbers": out.numel(),
    }
    return _launch(sum_up, out.numel(), (), arguments, {"PEERS": size, "HAND_ON": False})


def hand_on_launch(
    block: PartBlock, first: int, numbers: int, other: PartBlock, counter: Tensor
) -> Launch:
    """The same of so many numbers, into this rank's part of another block. counter: as of
    `give_launch`."""
    peers, size = peers_of(block)
    arguments = {
        "sources": block.sources,
        "out": _words_of(other, torch.bfloat16, numbers),
        "counter": counter,
        "peers": peers,
        "others": peers_of(other)[0],
        "first": first,
        "numbers": numbers,
    }
    return _launch(sum_up, numbers, (), arguments, {"PEERS": size, "HAND_ON": True})


def _words_of(block: PartBlock, dtype: torch.dtype, numbers: int) -> Tensor:
    return block.part[: numbers * dtype.itemsize].view(dtype)


def _launch(
    kernel: Any,
    numbers: int,
    more: tuple[int, ...],
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> Launch:
    grid = (divide_up(numbers, _BLOCK), *more)
    return Launch(kernel, grid, arguments, {**constants, "BLOCK": _BLOCK})


@triton.jit(do_not_specialize=["numbers"])
def give(words, part, counter, peers, numbers, PEERS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    tl.store(part + at, tl.load(words + at, mask=inside), mask=inside)
    signal_if_last(counter, tl.num_programs(0), peers, PEERS)


@triton.jit(do_not_specialize=["first", "numbers", "begin", "stride", "end"])
def take(
    sources,
    out,
    peers,
    first,
    numbers,
    begin,
    stride,
    end,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.program_id(1)
    place = begin + rank.to(tl.int64) * stride + at
    inside = (at < numbers) & (place < end)
    wait_for_peers(peers, PEERS)
    source = tl.load(sources + rank).to(tl.pointer_type(out.dtype.element_ty)) + first
    tl.store(out + place, tl.load(source + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["first", "numbers"])
def sum_up(
    sources,
    out,
    counter,
    peers,
    others,
    first,
    numbers,
    PEERS: tl.constexpr,
    HAND_ON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """peers: of the blocks that are added. others: of the one that the sum is handed on in."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    wait_for_peers(peers, PEERS)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(PEERS):
        part = tl.load(sources + rank).to(tl.pointer_type(tl.float32)) + first
        x = tl.load(part + at, mask=inside, other=0.0)
        total = x if rank == 0 else total + x
    tl.store(out + at, to_bf16(total), mask=inside)
    if HAND_ON:
        signal_if_last(counter, tl.num_programs(0), others, PEERS)
