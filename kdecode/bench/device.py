"""The floor of a step on a GPU: how fast its memory is read, now.

Owns the buffer that is read and its size. Does not know what the figure is for. The other module
of `bench`, beside `kernel`, that may touch kernels.
"""

from __future__ import annotations

import torch

from kdecode.kernels.common.triton_probe import read_launch

# Tens of times the last-level cache of a GPU.
PROBE_BYTES = 2 << 30


class DeviceReadProbe:
    """All of a CUDA device reads a buffer, as the kernels of a plan read weights."""

    def __init__(self, device: str, num_bytes: int = PROBE_BYTES) -> None:
        words = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
        self._device, self._num_bytes = words.device, words.numel() * 4
        count = torch.cuda.get_device_properties(words.device).multi_processor_count
        self._launch = read_launch(words, count)

    def bytes_per_second(self, passes: int = 5) -> float:
        """Of the best of some passes; one more comes first."""
        milliseconds = []
        with torch.cuda.device(self._device):
            for _ in range(passes + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self._launch.run()
                end.record()
                end.synchronize()
                milliseconds.append(start.elapsed_time(end))
        return self._num_bytes / min(milliseconds[1:]) * 1000
