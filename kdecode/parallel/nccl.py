"""Values between the GPUs of several ranks: torch.distributed's NCCL, a GPU a rank.

NCCL moves bytes only, as gloo does for the host, so that sums have the same order and the same bits
(`collectives.py`). The host is not held up by an exchange: NCCL's kernels wait for the other ranks
on the device. Owns the bound of that, in place of torch's own watchdog, which would end the process
without a name: where a step does not go on, or the group breaks, the connections are aborted, upon
which kernels that wait in vain end. Their values mean nothing, so that the end of every step asks
whether it was a whole one. Not torch's default group, which belongs to the process that embeds the
engine.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from kdecode.config import nccl_without_watchdog
from kdecode.kernels.contract import PartBlock
from kdecode.parallel.collectives import CollectiveExchange, Watch, wait_for_gpu, watched
from kdecode.parallel.ranks import Ranks

# How often it is looked whether a step goes on, at most and as a part of the bound.
_LOOK_S, _LOOKS = 0.5, 10
# How long whoever closes a group waits for the abort of its connections.
_CLOSE_S = 5.0


def refuse() -> list[str]:
    """Why this torch has no exchange between GPUs."""
    if distributed.is_available() and distributed.is_nccl_available():
        return []
    return [
        f"Ranks exchange values between GPUs through NCCL, which torch {torch.__version__} here "
        "was built without; install a torch build for CUDA."
    ]


def connect(store: Store, ranks: Ranks, device: str, timeout_s: float) -> Any:
    """NCCL's group of all ranks, of which each has a GPU; its connections come with the first
    exchange. device: this rank's. timeout_s: for finding each other, and for an abort."""
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device), nccl_without_watchdog():
        return ProcessGroupNCCL(store, ranks.rank, ranks.size, options)


def exchange_between(
    store: Store, ranks: Ranks, device: str, watch: Watch, patience_s: float
) -> NcclExchange:
    """Every rank calls it, and none goes on before all are connected. Raises RankError."""

    def make() -> NcclExchange:
        group = connect(store, ranks, device, patience_s)
        exchange = NcclExchange(group, ranks, watch, patience_s, device)
        # Kernels of a broken group would wait for ever, and the host for them: from the first on.
        watch.on_failure(lambda error: exchange.abandon())
        exchange.begin()
        exchange.gather(torch.zeros(1, 1, device=device))
        exchange.settle()
        return exchange

    return watched(watch, make)


class NcclExchange(CollectiveExchange):
    """Of tensors on this rank's GPU; one is there when the work that was launched before it is.

    A step is what is between `begin` and `settle`: in it no more than patience_s may pass from one
    exchange to the next.
    """

    transport = "nccl"

    def __init__(
        self, group: Any, ranks: Ranks, watch: Watch, patience_s: float, device: str
    ) -> None:
        super().__init__(group, ranks, watch, patience_s)
        self._device = device
        self._has_triton = torch.cuda.is_available() and find_spec("triton") is not None
        # When the step began, or its last exchange was launched; None between two steps.
        self._launched_at: float | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._look_after, name="kdecode-nccl", daemon=True).start()

    def begin(self) -> None:
        """A step begins. Exchanges that were recorded count as one, when they are replayed."""
        self.number += 1
        self._launched_at = time.monotonic()

    def settle(self) -> None:
        """Returns when the GPU has done everything that it was given.

        Raises RankError where another rank keeps it from that, or did until the connections were
        given up.
        """
        wait_for_gpu(self._device, self._watch)
        self._launched_at = None

    def close(self) -> None:
        """Also soon: an abort waits for the end of every recording of these connections, whoever
        has one; see `StepRunner.close`."""
        abort = self._aborting()
        abort.join(_CLOSE_S)

    def abandon(self) -> None:
        """Kernels that wait for another rank end, soon, with values that mean nothing."""
        # It may take as long as NCCL's own threads do, and whoever found the fault must not.
        self._aborting()

    def _aborting(self) -> threading.Thread:
        """A thread that gives the connections up, without their orderly end, which waits for every
        other rank to do the same."""
        self._is_over.set()
        group, self._group = self._group, None
        thread = threading.Thread(target=_abort, args=(group,), name="kdecode-abort", daemon=True)
        thread.start()
        return thread

    def _look_after(self) -> None:
        """Finds a step that does not go on although every rank is alive; the host may be stuck in
        it, where it waits for its GPU."""
        look_s = min(_LOOK_S, self._patience_s / _LOOKS)
        while not self._is_over.wait(look_s):
            begin = self._launched_at
            if begin is not None and time.monotonic() - begin > self._patience_s:
                self._watch.blame(
                    RuntimeError(
                        f"An exchange of {self._device} did not end within {self._patience_s:g} s."
                    )
                )
                return

    def _exchange(self, how: str, *given: Any) -> None:
        if self._launched_at is not None:
            self._launched_at = time.monotonic()
        super()._exchange(how, *given)

    def meet(self) -> None:
        """Returns at once; what is launched behind it begins once every rank has come as far."""
        self.gather(torch.zeros(1, 1, device=self._device))

    def hand_out(self, every: Tensor, part: Tensor) -> None:
        """part [bytes] of this rank -> every [size * bytes]."""
        self._exchange("_allgather_base", every, part)

    def _added(self, parts: Tensor) -> Tensor:
        """In one launch, where Triton is; in torch it is one a rank."""
        if not self._has_triton or not parts.numel():
            return super()._added(parts)
        # Imported like every kernel: only where it is launched, and not read by a type checker.
        kernel = import_module("kdecode.kernels.common.triton_rank_sum")
        total = parts.new_empty(parts.shape[1], dtype=torch.bfloat16)
        with torch.cuda.device(self._device):
            kernel.sum_launch(parts, total).run()
        return total

    def _every(self, part: Tensor) -> Tensor:
        given = part.contiguous().view(-1)
        taken = given.new_empty(self._ranks.size, given.numel())
        self._exchange("_allgather_base", taken.view(-1).view(torch.uint8), given.view(torch.uint8))
        return taken

    def _wait(self, work: Any) -> None:
        # Not the host: what is launched after this waits on the device.
        work.block_current_stream()


def _abort(group: Any) -> None:
    """group: None where it was given up before."""
    with suppress(RuntimeError):  # it took too long; the process ends without it
        if group is not None:
            group.abort()


class NcclBlocks:
    """`kernels.contract.DeviceExchange`: every block is gathered into this GPU's memory."""

    transport = "nccl"

    def __init__(self, exchange: NcclExchange, ranks: Ranks, device: str) -> None:
        self.size = ranks.size
        self._exchange = exchange
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def block(self, name: str, num_bytes: int) -> PartBlock:
        total = (1 + self.size) * num_bytes
        memory = self._memory.get(name)
        if memory is None or memory.numel() < total:
            memory = torch.empty(total, dtype=torch.uint8, device=self._device)
            self._memory[name] = memory
        part, every = memory[:num_bytes], memory[num_bytes:total]
        begins = [every.data_ptr() + rank * num_bytes for rank in range(self.size)]
        sources = torch.tensor(begins, dtype=torch.int64, device=self._device)
        return PartBlock(part, sources, partial(self._exchange.hand_out, every, part))
