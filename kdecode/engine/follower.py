"""The life of a rank that follows: it builds its share of a model and carries out what comes.

Owns the order of building and what each operation does here. Has no scheduler, no sampling, no
names and no reasons: rank 0 decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from kdecode.cache.batch import StepBatch
from kdecode.cache.mirror import (
    ClearSlot,
    CommitRows,
    DropRows,
    RestoreState,
    SaveState,
)
from kdecode.cache.state_store import StatePlaces
from kdecode.config import EngineConfig
from kdecode.decode.device import adopt_device
from kdecode.decode.rank_link import Compare, RankLink
from kdecode.decode.runner import StepRunner
from kdecode.engine.agreement import Agreement
from kdecode.engine.operations import Operation, RunStep
from kdecode.engine.prefix_caching import num_states
from kdecode.engine.rank import allocate_caches, trunk_format
from kdecode.engine.speculation import draft_config, verify_rows
from kdecode.model.layout import pack_model
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.group import Group


def follow(group: Group, directory: Path, engine: EngineConfig) -> None:
    """From the start of a process to the end of its group. Raises what goes wrong here."""
    if lacks_shared(group, engine):
        # Rank 0 says so.
        return
    follower = Follower(group, directory, engine)
    group.tell_ready()
    while (operation := group.receive()) is not None:
        follower.carry_out(operation)
    follower.runner.close()


def lacks_shared(group: Group, engine: EngineConfig) -> bool:
    """Whether the engine's backend needs memory that the ranks, on several hosts, do not share."""
    is_native = engine.decode_backend == "latency_specialized" and engine.device == "cpu"
    return is_native and group.shared is None


class Follower:
    """One rank's share of a model. engine: a resolved configuration."""

    def __init__(self, group: Group, directory: Path, engine: EngineConfig) -> None:
        engine = replace(engine, device=group.device_of(engine.device))
        adopt_device(engine.device)
        group.use_device(engine.device, engine.gpu_exchange)
        reader = CheckpointReader(directory, ranks=group.ranks)
        packed = pack_model(reader, trunk_format(engine), device=engine.device, isa=engine.isa)
        # Rows of a draft are on rank 0 alone, but count there, so that both have as many pages.
        draft = draft_config(engine, reader.whole)
        self.caches = allocate_caches(
            packed, engine, draft, ranks=group.ranks, has_draft_rows=False
        )
        self.places: StatePlaces | None = None
        if engine.enable_prefix_caching:
            self.places = StatePlaces(self.caches, num_states(packed.config, engine))
        self._group = group
        self._agreement = (
            Agreement(group.ranks, group.control.gather) if engine.check_ranks else None
        )
        link = RankLink(group.ranks, group.exchange, group.shared, self._around_step)
        self.runner = StepRunner(
            packed, self.caches, engine, verify_rows=verify_rows(engine), link=link
        )

    def carry_out(self, operation: Operation) -> None:
        if self._agreement is not None:
            self._agreement.note(operation)
        match operation:
            case RunStep(batch):
                self.runner.run(batch)
            case ClearSlot(slot):
                self.caches.clear_slot(slot)
            case DropRows(slot):
                self.caches.drop_rows(slot)
            case CommitRows(kept):
                self.caches.commit(dict(kept))
            case SaveState(place, slot):
                self._state_places().save(place, slot)
            case RestoreState(place, slot):
                self._state_places().restore(place, slot)

    def _state_places(self) -> StatePlaces:
        if self.places is None:
            raise ValueError("A state is to be kept; this engine has no prefix cache.")
        return self.places

    @contextmanager
    def _around_step(self, batch: StepBatch) -> Iterator[Compare]:
        def compare(prefix: torch.Tensor) -> None:
            if self._agreement is not None:
                self._agreement.compare(batch, prefix)

        self._group.begin()
        yield compare
        self._group.settle()
