"""Rank 0's side of a model that several ranks share: it decides, and the others do the same.

Owns what the others are told and in which order, and that a group is broken once and for all: what
breaks a step on any rank ends every request, with an error that names the rank. Does not know how
ranks are started or how values travel (`kdecode.parallel`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.cache.mirror import CacheOperation
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.deployment import BackendRefusedError
from kdecode.decode.rank_link import Compare, RankLink
from kdecode.engine.agreement import Agreement, DisagreementError
from kdecode.engine.follower import follow, lacks_shared
from kdecode.engine.operations import RunStep, describe
from kdecode.model.rank_share import share_of
from kdecode.parallel import launch
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import RankError, Ranks

log = logging.getLogger(__name__)


class Leader:
    """The others, as rank 0 sees them. failure: what broke the group; None while it is whole.

    device: of this rank. num_steps: that were begun on all ranks. processes: of the other ranks.
    """

    def __init__(self, group: Group, engine: EngineConfig) -> None:
        self.failure: RankError | None = None
        self._group = group
        self._agreement = (
            Agreement(group.ranks, group.control.gather) if engine.check_ranks else None
        )
        self.device = group.device_of(engine.device)
        self.num_steps = 0
        self.processes = dict(group.processes)

    @property
    def ranks(self) -> Ranks:
        return self._group.ranks

    @property
    def gpu_exchange(self) -> str | None:
        """What the ranks' GPUs exchange values through; None without GPUs."""
        transport = self._group.exchange.transport
        return None if transport == "gloo" else transport

    @property
    def link(self) -> RankLink:
        return RankLink(
            self._group.ranks, self._group.exchange, self._group.shared, self.around_step
        )

    def tell(self, operation: CacheOperation) -> None:
        """What this rank's caches have done. Of a broken group the next step says so."""
        if self.failure is not None:
            return
        try:
            self._send(operation)
        except RankError as error:
            self._fail(error)

    @contextmanager
    def around_step(self, batch: StepBatch) -> Iterator[Compare]:
        """See `AroundStep`. Raises RankError for whatever goes wrong, on whichever rank."""
        self.require_whole()
        self.num_steps += 1
        try:
            self._send(RunStep(batch))
            self._group.begin()
            yield lambda prefix: self._compare(batch, prefix)
            self._group.settle()
        except BaseException as error:
            is_fault = isinstance(error, Exception)
            self._fail(self._named(error, batch), logging.ERROR if is_fault else logging.INFO)
            # An interrupt stays one for its caller; the steps after it are told why they break.
            if is_fault:
                raise self.failure from error  # type: ignore[misc]
            raise

    def require_whole(self) -> None:
        """Raises RankError where the group is broken."""
        if self.failure is not None:
            raise RankError(self.failure.rank, self.failure.what)

    def check(self) -> None:
        """Raises RankError where another rank has died or stands still."""
        self.require_whole()
        with self._breaking():
            self._group.check()

    def wait_until_built(self) -> None:
        """Until the other ranks can carry out operations. Raises RankError."""
        with self._breaking():
            self._group.wait_until_ready()

    def close(self) -> None:
        """Ends the other ranks and gives back what the group shares."""
        self._group.close()

    def _send(self, operation: CacheOperation | RunStep) -> None:
        if self._agreement is not None:
            self._agreement.note(operation)
        self._group.send(operation)

    def _compare(self, batch: StepBatch, prefix: Tensor) -> None:
        if self._agreement is not None:
            self._agreement.compare(batch, prefix)

    def _named(self, error: BaseException, batch: StepBatch) -> RankError:
        """Which rank is to blame for a step that broke, and when that was."""
        if isinstance(error, DisagreementError):
            process = self.processes.get(error.rank, os.getpid())
            what = f"of {self.ranks.size} (process {process}) {error},"
            found = RankError(error.rank, what)
        elif isinstance(error, RankError):
            # Whose exchange failed need not be whose fault it is.
            found = self._group.blame(error)
        else:
            found = self._group.report(error)
        return RankError(
            found.rank, f"{found.what} during step {self.num_steps} ({describe(batch)})"
        )

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """A RankError in the block is the end of the group."""
        try:
            yield
        except RankError as error:
            self._fail(error)
            raise

    def _fail(self, error: RankError, level: int = logging.ERROR) -> None:
        """Final: the others are ended at once, so that nothing waits for what never comes."""
        if self.failure is None:
            self.failure = error
            log.log(level, "the ranks of this model are broken: %s", error)
            self._group.close()


def start_ranks(directory: Path, config: ModelConfig, engine: EngineConfig) -> Leader:
    """Starts the other ranks, which build their shares of a checkpoint meanwhile.

    config: of the whole model. engine: a resolved configuration that preflight has passed. Under
    torchrun only rank 0 returns. Raises ConfigError, RankError, and BackendRefusedError for native
    steps of ranks that are not on one host.
    """
    ranks = Ranks(0, engine.tensor_parallel_size)
    part_bytes = None
    if engine.decode_backend == "latency_specialized" and engine.device == "cpu":
        share, most = share_of(config, ranks.size), latency_specialized.ROW_BUCKETS[-1]
        part_bytes = latency_specialized.exchange_bytes(
            share,
            ranks.size,
            most,
            shares_context=engine.decode_context_parallel_size > 1,
        )
    group = launch.start(
        ranks.size,
        follow,
        (directory, engine),
        num_threads=engine.resolved_threads(),
        timeout_s=engine.rank_timeout_s,
        part_bytes=part_bytes,
    )
    if lacks_shared(group, engine):
        group.close()
        raise BackendRefusedError(
            [
                f"Its steps exchange values through memory that all ranks share; the "
                f"{ranks.size} ranks are on {group.num_hosts} hosts."
            ]
        )
    try:
        group.use_device(group.device_of(engine.device), engine.gpu_exchange)
    except BaseException:
        group.close()
        raise
    return Leader(group, engine)
