"""Measurements that need native code: the read loop. The one module of `bench` that may touch it.

Owns the buffer that is read and its size. Does not know what the figures are for.
"""

from __future__ import annotations

import torch

from kdecode.kernels.common.matrix import empty_huge
from kdecode.kernels.common.native import Pool, time_stream

# Several times any last-level cache that a desktop or a slice of a server has.
PROBE_BYTES = 256 << 20


class ReadProbe:
    """Threads that read a buffer on huge pages, as the kernels read packed weights."""

    def __init__(self, num_threads: int, num_bytes: int = PROBE_BYTES) -> None:
        self.num_threads = num_threads
        # Written, so that the pages exist: unwritten ones would all be one page of zeros.
        self._data = empty_huge((num_bytes,), torch.uint8).fill_(1)
        self._pool = Pool(num_threads)

    def bytes_per_second(self, passes: int = 3) -> float:
        """Of the best of some passes."""
        size = self._data.numel()
        seconds = time_stream(self._pool, self._data.data_ptr(), size, passes)
        return size / min(seconds)
