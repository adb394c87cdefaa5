"""What a rank has of its group: the others' values, their operations, and whether all is well.

Owns the order in which a group ends. Rank 0 decides and sends operations, the others receive them;
a group that broke stays broken, and every method then raises the `RankError` that names the rank at
fault. Does not know how ranks are started (`launch`) nor what operations mean.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import Store

from kdecode.config import ConfigError, GpuExchange
from kdecode.parallel.channel import ChannelClosedError, Receiver, Sender
from kdecode.parallel.collectives import GlooExchange, GroupExchange
from kdecode.parallel.monitor import PATIENCE, Monitor
from kdecode.parallel.ranks import RankError, Ranks

if TYPE_CHECKING:
    from kdecode.parallel.nccl import NcclExchange
    from kdecode.parallel.symmetric import SymmetricExchange

log = logging.getLogger(__name__)

# How long followers of a whole group may take to carry out what was sent before the end.
_LAST_OPERATIONS_S = 5.0


class Group:
    """One rank's end of a group.

    control: the exchange of values on the host. exchange: that of the standard forward, between
    GPUs behind `use_device`. shared: that of the steps of plans, None for native ones across hosts
    and where it was not asked for. store: where the ranks find each other. local_index: of this
    process among those of its host, None where nobody tells. processes: of the ranks that this one
    watches; followers watch rank 0. end_followers: ends the processes that this one has started,
    None where it has none.
    """

    def __init__(
        self,
        monitor: Monitor,
        channel: Sender | Receiver,
        exchange: GlooExchange,
        shared: Any,
        store: Store,
        num_hosts: int,
        local_index: int | None,
        end_followers: Callable[[float], None] | None,
    ) -> None:
        self.ranks: Ranks = monitor.ranks
        self.num_hosts = num_hosts
        self.control = exchange
        self.exchange: GroupExchange = exchange
        self.shared = shared
        self.processes = monitor.processes
        self._monitor = monitor
        self._channel = channel
        self._store = store
        self._local_index = local_index
        self._on_device: NcclExchange | SymmetricExchange | None = None
        self._end_followers = end_followers
        self._closing = threading.Lock()
        self._is_closed = False
        if shared is not None:
            # A native step waits in memory, where it would learn of it only after a while.
            monitor.on_failure(lambda error: shared.fail(error.rank))

    # Rank 0.

    def send(self, operation: object) -> None:
        """Hands a small picklable value to every follower, behind those sent before.

        Raises RankError. What interrupts it breaks the group, since only some followers have it.
        """
        assert isinstance(self._channel, Sender), "only rank 0 sends operations"
        self.check()
        try:
            self._channel.send(operation)
        except RankError:
            raise
        except ChannelClosedError as error:
            raise self.blame(error) from error
        except BaseException as error:
            self.report(error)
            raise

    def wait_until_ready(self) -> None:
        """Until every follower is, for as long as they are alive. Raises RankError."""
        self._monitor.wait_until_ready()

    # Followers.

    def receive(self) -> Any:
        """The next operation; None once rank 0 has closed the group. Raises RankError."""
        assert isinstance(self._channel, Receiver), "rank 0 receives no operations"
        try:
            return self._channel.receive()
        except ChannelClosedError as error:
            if self._monitor.wait_for_end(2 * self._monitor.timeout_s):
                return None
            raise self.blame(error) from error

    def tell_ready(self) -> None:
        """This follower has built what it needs; see `wait_until_ready`."""
        self._monitor.tell_ready()

    # Every rank.

    def device_of(self, device: str) -> str:
        """This rank's own of the devices of its host: "cpu", or of "cuda" the GPU of its number.

        Raises ConfigError where its number is not known.
        """
        if device == "cpu":
            return device
        if self._local_index is None:
            raise ConfigError(
                "LOCAL_RANK is not set, by which a rank knows its GPU; torchrun sets it where it "
                "sets RANK."
            )
        return f"cuda:{self._local_index}"

    def use_device(self, device: str, wanted: GpuExchange = "auto") -> None:
        """From here on the values of the standard forward are on this rank's own device.

        Every rank calls it before it exchanges any, and wants the same: "auto" is symmetric memory
        where every rank has it, else NCCL. Raises RankError, and ConfigError where there is not
        what is wanted.
        """
        if device == "cpu":
            return
        monitor, patience_s = self._monitor, PATIENCE * self._monitor.timeout_s
        sharing = None
        if wanted != "nccl" and self._may_share_memory(device, wanted):
            sharing = self._share_memory(device, wanted, patience_s)
        if sharing is not None:
            self._on_device, self.shared = sharing, sharing.blocks
        else:
            from kdecode.parallel import nccl

            connected = nccl.exchange_between(self._store, self.ranks, device, monitor, patience_s)
            self._on_device = connected
            self.shared = nccl.NcclBlocks(connected, self.ranks, device)
        control, exchange = self.control, self._on_device
        self.exchange = exchange
        monitor.progress = lambda: control.number + exchange.number

    def _share_memory(
        self, device: str, wanted: GpuExchange, patience_s: float
    ) -> SymmetricExchange | None:
        """None on every rank where one of them finds that it cannot, although it should.

        Raises RankError, and ConfigError where that is wanted and cannot be.
        """
        from kdecode.parallel import symmetric
        from kdecode.parallel.symmetric_memory import NotSharedError

        try:
            return symmetric.exchange_between(
                self._store, self.ranks, device, self._monitor, patience_s, self.control.gather
            )
        except NotSharedError as error:
            if wanted == "symmetric":
                raise ConfigError(f"gpu_exchange is 'symmetric', and {error}") from error
            log.warning("the GPUs exchange values through NCCL: %s", error)
            return None

    def _may_share_memory(self, device: str, wanted: GpuExchange) -> bool:
        """Whether every rank can read every other's memory, which all of them find out together.

        Raises ConfigError where that is wanted and cannot be.
        """
        from kdecode.parallel import symmetric

        own = torch.tensor([[torch.device(device).index or 0]])
        devices = self.control.gather(own).view(-1).tolist()
        reasons = symmetric.refuse(devices, is_one_host=self.num_hosts == 1)
        refusals = self.control.gather(torch.tensor([[len(reasons)]])).view(-1)
        if wanted == "symmetric" and reasons:
            raise ConfigError(" ".join(reasons))
        if reasons:
            log.info("the GPUs exchange values through NCCL: %s", " ".join(reasons))
        if wanted == "symmetric" and refusals.any():
            rank = int(refusals.nonzero()[0])
            raise ConfigError(f"gpu_exchange is 'symmetric', and rank {rank} has no such memory.")
        return not refusals.any()

    def begin(self) -> None:
        """A step begins, which `settle` ends."""
        if self._on_device is not None:
            self._on_device.begin()

    def settle(self) -> None:
        """Returns when what this rank's device was given is done. Raises RankError where another
        rank keeps it from that."""
        if self._on_device is not None:
            self._on_device.settle()

    def meet(self) -> None:
        """What this rank's device is given after it begins once every rank has come as far."""
        if self._on_device is not None:
            self._on_device.meet()

    def check(self) -> None:
        """Raises RankError where the group is broken: a rank died, failed or stands still."""
        self._monitor.check()

    def report(self, error: BaseException) -> RankError:
        """This rank failed, which breaks the group. Returns what every rank is told."""
        return self._monitor.report(error)

    def blame(self, error: BaseException) -> RankError:
        """Who is at fault for an exchange or a message that failed; the group is broken after it.

        Takes until that is certain, which is bounded by a little more than the group's timeout.
        """
        return self._monitor.blame(error)

    def close(self) -> None:
        """Ends followers and gives back what the group has; again, it does nothing.

        Rank 0 gives followers of a whole group a moment to carry out what was sent, and ends the
        processes of a broken one at once.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        is_whole = self._monitor.failure is None
        if self.ranks.is_leader and is_whole:
            self._monitor.end()
        self._channel.close()
        if self._end_followers is not None:
            self._end_followers(_LAST_OPERATIONS_S if is_whole else 0.0)
        self._monitor.close()
        # Last: gloo waits for exchanges that are under way, which the ends of processes have ended.
        for exchange in dict.fromkeys((self.exchange, self.control)):
            if is_whole or self._end_followers is not None:
                exchange.close()
            else:
                exchange.abandon()
