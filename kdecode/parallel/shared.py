"""The memory through which the ranks of one machine exchange values: one makes it, all map it.

Owns the memory's life, the limits of its waits, and the words of an exchange that failed. The
exchange itself is native (`kernels/common/exchange.h`); who starts the ranks is not known here.
"""

from __future__ import annotations

import os

from kdecode.kernels.common.native import SharedExchange, available_cores
from kdecode.parallel.monitor import PATIENCE
from kdecode.parallel.ranks import RankError, Ranks

_PAGE_BYTES = 4096


class Segment:
    """Memory of one group's exchanges, of no name in any file system.

    It is there as long as a process has it open or mapped, so that nothing of it is left however
    its processes end. ``path`` is where others of this machine find it, until `close`.
    part_bytes: the most that a rank gives in one exchange.
    """

    def __init__(self, size: int, part_bytes: int) -> None:
        self.size = size
        self.part_bytes = max(1, -(-part_bytes // _PAGE_BYTES)) * _PAGE_BYTES
        num_bytes = SharedExchange.segment_bytes(size, self.part_bytes)
        self._fd = os.memfd_create("kdecode-exchange", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Nobody can join any more; who has joined keeps the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def join(
    path: str, part_bytes: int, ranks: Ranks, *, num_threads: int, timeout_s: float
) -> SharedExchange:
    """A rank's end of a `Segment`, whose path and part_bytes these are; each rank has one.

    num_threads: of each rank. timeout_s: after which a rank that stands still is given up; one that
    is alive has `PATIENCE` times as long. Raises OSError where the memory cannot be found, and
    ValueError where it is another group's.
    """
    # With more threads than cores, whoever a thread is waiting for needs its core.
    can_spin = ranks.size * num_threads <= available_cores()
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedExchange(
            file, ranks.rank, ranks.size, part_bytes, can_spin, timeout_s, PATIENCE * timeout_s
        )
    finally:
        os.close(file)


def exchange_error(shared: SharedExchange, place: str) -> RankError:
    """The error of a failed exchange, with the rank that was waited for.

    place: where in the step the exchange is.
    """
    failure = shared.failure
    if failure is None:
        raise ValueError("No exchange has failed.")
    reasons = type(failure).Reason
    done = {
        reasons.silent: f"gave no sign of life for {shared.silence_s:g} s",
        reasons.late: f"did not come within {shared.patience_s:g} s",
        reasons.reported: "was gone",
    }[failure.reason]
    waited = f"while rank {failure.waiter} waited for it {place}"
    return RankError(failure.awaited, f"of {shared.size} {done} {waited}")
