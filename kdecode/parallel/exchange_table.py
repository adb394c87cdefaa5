"""Sums of parts in one hop or in two: the sizes at which the ranks change from one to the other.

In one hop every rank is given every part and adds all numbers; in two it adds its piece of them and
gives the sum to the others, which moves fewer bytes and waits once more. Both add in the order of
the ranks and give the same bits, so that the table decides nothing but the time.
"""

from __future__ import annotations

# By what moves the bytes: how many a rank may be given in one hop, its own among them. gloo's is
# from loopback, where bytes cost more than a hop above it. Those of GPUs were measured nowhere yet:
# they are what one receives over NVLink in about two launches of a collective of NCCL, or in one
# launch and wait more through symmetric memory. So in a decode step of Kimi K3 on 16 ranks the sum
# of an attention (28 KB a part and row) takes one hop up to two rows, or four through symmetric
# memory, and the sums that travel together behind the experts (42 KB) up to one row, or three.
# Where those take two hops and either alone would take one, they are as many waits as apart, of a
# tenth of the bytes.
_ONE_HOP_BYTES = {"gloo": 2 << 20, "nccl": 1 << 20, "symmetric": 2 << 20}


def one_hop_bytes(transport: str) -> int:
    """KeyError for a transport that there is not."""
    return _ONE_HOP_BYTES[transport]
