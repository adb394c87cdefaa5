"""Signals between the GPUs of several ranks, inside of the kernels that exchange values.

Of a launch that leaves a part for the other ranks the last program to arrive signals, and every
program of the launch that reads the parts of all ranks waits first. The words are `peer_table`'s.
Of ranks whose blocks something else moves (`PartBlock.run`) nothing of this is compiled.

A signal is a store that releases at system scope and a wait polls with loads that acquire there,
by one thread a rank, between barriers of the program. Order is passed on from each to the next:
from what any thread has stored, through a barrier of its program, the atomic arrivals and a barrier
of the last program, to the store; and from the load through a barrier to what any thread reads.

A wait has a bound. One that comes to it writes down for whom and for what it was, and goes on, as
all later ones do at once; the values of such a step mean nothing, and the host asks at its end. A
rank that has given up its waits signals no more: whoever needs what it has made of them waits, too,
until its own bound or until the group is known to be broken.

No wait needs programs of its own launch. It ends with signals that other GPUs send in launches that
wait for earlier exchanges alone, whose launches are over here, so that it does not matter for how
many programs a GPU has room; nor that the next launch may have begun (`wait_for_previous`), which
gets room when all programs of this one have theirs. A kernel whose programs wait for each other
says why those that they wait for run (`peer_table.MOST_WAITING`).
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
# Both by thread r for rank r, of the first warp, and by no other thread: a value of a program is in
# all of its threads, which would each store and each poll.
#
# $1 is a table and $2 its number of ranks; $3 is stored $4 bytes into the row of each, unless waits
# are given up by the word $5.
_SIGNAL = tl.constexpr("""
{
    .reg .u32 peer;
    .reg .u64 row;
    .reg .s32 seen;
    .reg .pred p;
    mov.u32 peer, %tid.x;
    setp.ge.u32 p, peer, $2;
    @p bra done;
    ld.relaxed.sys.global.s32 seen, [$5];
    setp.ne.s32 p, seen, 0;
    @p bra done;
    mad.wide.u32 row, peer, 8, $1;
    ld.global.u64 row, [row];
    add.u64 row, row, $4;
    st.release.sys.global.s32 [row], $3;
done:
    mov.u32 $0, 0;
}
""")
# $1 is this rank's row of flags of $2 ranks, and $3 what they have to reach, in numbers that wrap;
# $4 is the word by which waits are given up and $5 the bound in nanoseconds. Of a rank that does
# not come $7 is written to its word behind $6, and waits are given up.
_WAIT = tl.constexpr("""
{
    .reg .u32 peer;
    .reg .u64 now, end, word;
    .reg .s32 seen;
    .reg .pred p;
    mov.u32 peer, %tid.x;
    setp.ge.u32 p, peer, $2;
    @p bra done;
    mad.wide.u32 word, peer, 4, $1;
    mov.u64 end, %globaltimer;
    add.u64 end, end, $5;
again:
    ld.acquire.sys.global.s32 seen, [word];
    sub.s32 seen, seen, $3;
    setp.ge.s32 p, seen, 0;
    @p bra done;
    ld.relaxed.sys.global.s32 seen, [$4];
    setp.ne.s32 p, seen, 0;
    @p bra done;
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, end;
    @p bra again;
    mad.wide.u32 word, peer, 4, $6;
    st.relaxed.sys.global.s32 [word], $7;
    st.relaxed.sys.global.s32 [$4], 1;
done:
    mov.u32 $0, 0;
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
    before is there for whoever has seen the signal. Also what they wrote of a wait in vain is there
    for this program, which then tells nobody.
    """
    if PEERS > 0:
        table = peers + PEERS
        epoch = tl.load(table + _EPOCH).to(tl.pointer_type(tl.int32))
        given_up = tl.load(table + _FAULT).to(tl.pointer_type(tl.int32)) + _GIVEN_UP
        rank = tl.load(table + _RANK)
        number = tl.load(epoch) + 1
        # Every thread has read the epoch, and has stored what it had to store.
        tl.debug_barrier()
        tl.store(epoch, number)
        if IS_INTERPRETED:
            lane = tl.arange(0, triton.next_power_of_2(PEERS))
            is_told = (lane < PEERS) & (tl.load(given_up) == 0)
            row = tl.load(peers + lane, mask=is_told, other=0).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(row + rank, number, mask=is_told, sem="release", scope="sys")
        else:
            tl.inline_asm_elementwise(
                _SIGNAL,
                "=r,l,r,r,l,l,~{memory}",
                [peers.to(tl.int64), PEERS, number, rank * 4, given_up.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        # This program may wait, by the epoch.
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
        limit = tl.load(fault + _LIMIT)
        if IS_INTERPRETED:
            _wait_in_interpreter(own, number, fault, place, limit, PEERS)
        else:
            tl.inline_asm_elementwise(
                _WAIT,
                "=r,l,r,r,l,l,l,r,~{memory}",
                [
                    own.to(tl.int64),
                    PEERS,
                    number,
                    (fault + _GIVEN_UP).to(tl.int64),
                    limit.to(tl.int64) * 1_000_000,
                    (fault + _LATE).to(tl.int64),
                    place + 1,
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        # No thread reads a block before those that poll have seen its flags.
        tl.debug_barrier()


@triton.jit
def _wait_in_interpreter(own, number, fault, place, limit, PEERS: tl.constexpr):
    """Rank by rank, with one bound for all of them."""
    looks = limit.to(tl.int64) * _LOOKS_A_MS
    for rank in range(PEERS):
        while (tl.load(own + rank) - number < 0) & (tl.load(fault + _GIVEN_UP) == 0) & (looks > 0):
            looks -= 1
    word = tl.arange(0, triton.next_power_of_2(PEERS))
    is_rank = word < PEERS
    is_behind = tl.load(own + word, mask=is_rank, other=0) - number < 0
    is_late = is_rank & is_behind & (tl.load(fault + _GIVEN_UP) == 0)
    tl.store(fault + _LATE + word, place + 1 + 0 * word, mask=is_late)
    tl.store(fault + _GIVEN_UP + 0 * word, 1 + 0 * word, mask=is_late)
