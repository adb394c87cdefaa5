"""Signals between the GPUs of several ranks, inside of the kernels that exchange values.

Of a launch that leaves a part for the other ranks the last program to arrive signals, and every
program of the launch that reads the parts of all ranks waits first. The words are `peer_table`'s.
Of ranks whose blocks something else moves (`PartBlock.run`) nothing of this is compiled.

A wait has a bound. One that comes to it writes down for whom and for what it was, and goes on, as
all later ones do at once; the values of such a step mean nothing, and the host asks at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common import peer_table
from kdecode.kernels.common.triton_ops import IS_INTERPRETED, is_last_arrival
from kdecode.kernels.contract import Buffers, PartBlock

_EPOCH = tl.constexpr(peer_table.EPOCH)
_FAULT = tl.constexpr(peer_table.FAULT)
_RANK = tl.constexpr(peer_table.RANK)
_PLACE = tl.constexpr(peer_table.PLACE)
_LIMIT = tl.constexpr(peer_table.LIMIT)
_GIVEN_UP = tl.constexpr(peer_table.GIVEN_UP)
_LATE = tl.constexpr(peer_table.LATE)
# The interpreter has no clock: a millisecond is so many looks at a flag, which take it longer.
_LOOKS_A_MS = tl.constexpr(1)
# $1 is a flag and $2 what it has to reach, in numbers that wrap; $3 is the word by which waits are
# given up and $4 the bound in nanoseconds. $0: 0 if it was reached, 1 at the bound, 2 if given up.
# Each thread has a loop of its own, since threads of one program may see a flag at different times.
_WAIT = tl.constexpr("""
{
    .reg .u64 now, end;
    .reg .s32 seen, gone, how;
    .reg .pred p;
    mov.u64 end, %globaltimer;
    add.u64 end, end, $4;
    mov.s32 how, 0;
again:
    ld.acquire.sys.global.s32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.ge.s32 p, seen, 0;
    @p bra done;
    ld.relaxed.sys.global.s32 gone, [$3];
    setp.ne.s32 p, gone, 0;
    @p bra given_up;
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, end;
    @p bra again;
    mov.s32 how, 1;
    bra done;
given_up:
    mov.s32 how, 2;
done:
    mov.s32 $0, how;
}
""")


def peers_of(block: PartBlock) -> tuple[Tensor, int]:
    """The ``peers`` of a kernel and its constant PEERS: how many ranks signal each other. Without
    such ranks it is 0, and the tensor is never read."""
    if block.peers is None:
        return block.sources, 0
    return block.peers, block.sources.numel()


@dataclass(frozen=True)
class Signal:
    """What a kernel that calls `signal_if_last` takes: ``arrivals``, ``peers`` and PEERS."""

    arguments: dict[str, Tensor]
    constants: dict[str, int]


def signal_of(block: PartBlock | None, buffers: Buffers, unused: Tensor) -> Signal:
    """Of a launch that makes all of a block; None for values that are no other rank's. unused: any
    tensor, for kernels that tell nobody."""
    peers, size = (unused, 0) if block is None else peers_of(block)
    arrivals = buffers.counters(1) if size else unused
    return Signal({"arrivals": arrivals, "peers": peers}, {"PEERS": size})


@triton.jit
def signal_peers(peers, PEERS: tl.constexpr):
    """Tells every rank that this one's block is whole.

    For one program, behind the arrival of all that write to the block: what those stored
    before is there for whoever has seen the signal.
    """
    if PEERS > 0:
        table = peers + PEERS
        epoch = tl.load(table + _EPOCH).to(tl.pointer_type(tl.int32))
        rank = tl.load(table + _RANK)
        number = tl.load(epoch) + 1
        lane = tl.arange(0, triton.next_power_of_2(PEERS))
        is_rank = lane < PEERS
        row = tl.load(peers + lane, mask=is_rank, other=0).to(tl.pointer_type(tl.int32))
        # Every thread has read the epoch, and has stored what it had to store.
        tl.debug_barrier()
        tl.store(epoch, number)
        tl.atomic_xchg(row + rank, number, mask=is_rank, sem="release", scope="sys")
        tl.debug_barrier()


@triton.jit
def signal_if_last(counter, expected, peers, PEERS: tl.constexpr):
    """This program has stored its share of the block; the last of ``expected`` tells every rank.

    counter: int32 of the launch's own, 0 before it and behind it.
    """
    # Two conditions, of which the compiler knows one.
    if PEERS > 0:  # noqa: SIM102
        if is_last_arrival(counter, expected):
            signal_peers(peers, PEERS)


@triton.jit
def wait_for_peers(peers, PEERS: tl.constexpr):
    """Returns when every rank's block is whole as often as this rank's own one is.

    For every program that reads such blocks, behind the launch or the program that has signalled.
    """
    if PEERS > 0:
        table = peers + PEERS
        number = tl.load(tl.load(table + _EPOCH).to(tl.pointer_type(tl.int32)))
        fault = tl.load(table + _FAULT).to(tl.pointer_type(tl.int32))
        own = tl.load(peers + tl.load(table + _RANK)).to(tl.pointer_type(tl.int32))
        place = tl.load(table + _PLACE).to(tl.int32)
        lane = tl.arange(0, triton.next_power_of_2(PEERS))
        word = tl.minimum(lane, PEERS - 1)
        limit = tl.load(fault + _LIMIT)
        if IS_INTERPRETED:
            looks = limit.to(tl.int64) * _LOOKS_A_MS
            for rank in range(PEERS):
                while (
                    (tl.load(own + rank) - number < 0)
                    & (tl.load(fault + _GIVEN_UP) == 0)
                    & (looks > 0)
                ):
                    looks -= 1
            is_behind = tl.load(own + word) - number < 0
            is_late = is_behind & (tl.load(fault + _GIVEN_UP) == 0)
        else:
            ended = tl.inline_asm_elementwise(
                _WAIT,
                "=r,l,r,l,l",
                [
                    (own + word).to(tl.int64),
                    number + 0 * word,
                    (fault + _GIVEN_UP + 0 * word).to(tl.int64),
                    limit.to(tl.int64) * 1_000_000 + 0 * word,
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            is_late = ended == 1
        tl.store(fault + _LATE + word, place + 1 + 0 * word, mask=is_late)
        tl.store(fault + _GIVEN_UP + 0 * word, 1 + 0 * word, mask=is_late)
        tl.debug_barrier()
