"""prefetch: weights that later launches read are brought into the second-level cache.

It covers no stage, computes nothing and changes nothing: it runs beside the launches that wait for
one another rather than for memory, and without it every value is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import OpContract, Tolerance

# The second-level cache by architecture, as published for H200 and B200; B300 is taken to have that
# of B200. Plans of other architectures do not prefetch.
L2_BYTES: Mapping[str, int] = {"sm_90": 50 << 20, "sm_100": 126 << 20, "sm_103": 126 << 20}
# One prefetch asks for at most a quarter of it: what the launches beside it read has to have room,
# and so have the weights of the prefetch before, until they are read.
_SHARE = 4


@dataclass(frozen=True)
class PrefetchUse:
    """matrices: in the order in which they will be read."""

    matrices: tuple[Matrix, ...]


CONTRACT = OpContract(
    name="prefetch",
    covers=(),
    reads=(),
    writes=(),
    mutates=(),
    tolerance=Tolerance(rtol=0.0, atol=0.0, rms_ratio=0.0),
)


def most_bytes(arch: str) -> int:
    """Of one prefetch. KeyError for an architecture that is not in `L2_BYTES`."""
    return L2_BYTES[arch] // _SHARE


def spans(use: PrefetchUse, arch: str) -> Iterator[tuple[Matrix, int]]:
    """The matrices that are asked for, each with how many of its first bytes."""
    left = most_bytes(arch)
    for matrix in use.matrices:
        taken = min(left, matrix.num_bytes)
        if taken > 0:
            yield matrix, taken
        left -= taken


def refuse_arch(arch: str) -> list[str]:
    """Why weights are not prefetched on an architecture; [] where they can be."""
    if arch in L2_BYTES:
        return []
    return [
        "weight_prefetch is 'l2'; the size of the second-level cache is known of "
        f"{', '.join(L2_BYTES)}, and not of {arch or 'the device'}: set weight_prefetch to 'off'."
    ]
