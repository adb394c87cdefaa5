"""The exchange through shared memory: the same bits for all, and an end to every wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from shared_cases import WIDTH, make_part, reduce_in_process, reduce_many, stand_by

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import Pool, SharedExchange, detect_isa, supported_isas
from kdecode.kernels.exchange.native import reduce_step
from kdecode.parallel.ranks import Ranks
from kdecode.parallel.shared import PATIENCE, Segment, exchange_error, join


@contextmanager
def _segment(size: int, part_bytes: int = 4 * 64 * WIDTH) -> Iterator[Segment]:
    segment = Segment(size, part_bytes)
    try:
        yield segment
    finally:
        segment.close()


def _join(segment: Segment, rank: int, threads: int = 1, timeout_s: float = 5.0) -> SharedExchange:
    ranks = Ranks(rank, segment.size)
    return join(segment.path, segment.part_bytes, ranks, num_threads=threads, timeout_s=timeout_s)


def _in_threads(size: int, body: Callable[[int], None]) -> None:
    """body(rank) on a thread each; the first error of any is raised here."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("size", "threads"), [(2, 1), (2, 2), (5, 2), (16, 1)])
@pytest.mark.parametrize("isa", supported_isas())
def test_ranks_in_threads_get_the_ordered_sum(size: int, threads: int, isa: str) -> None:
    with _segment(size) as segment:

        def body(rank: int) -> None:
            shared = _join(segment, rank, threads)
            reduce_many(shared, Pool(threads, can_oversubscribe=True), isa, 25)
            assert shared.failure is None
            assert shared.number == 25

        _in_threads(size, body)


def test_ranks_in_processes_get_the_ordered_sum() -> None:
    context = multiprocessing.get_context("spawn")
    with _segment(3) as segment:
        others = [
            context.Process(
                target=reduce_in_process,
                args=(segment.path, segment.part_bytes, Ranks(rank, 3), 40),
            )
            for rank in (1, 2)
        ]
        for other in others:
            other.start()
        reduce_many(_join(segment, 0, timeout_s=30.0), Pool(1), detect_isa(), 40)
        for other in others:
            other.join(30)
            assert other.exitcode == 0


def _wait_in_vain(shared: SharedExchange) -> float:
    """Seconds that a rank waits for one that does not come."""
    out = torch.empty(1, WIDTH, dtype=torch.bfloat16)
    step = reduce_step(Pool(1), detect_isa(), shared, make_part(0, 0, 1), out)
    begin = time.monotonic()
    step.run()
    return time.monotonic() - begin


def test_a_rank_that_is_not_there_is_named_in_time() -> None:
    with _segment(3) as segment:
        first, second = _join(segment, 0, timeout_s=0.4), _join(segment, 1, timeout_s=0.4)
        spent: dict[int, float] = {}

        def body(rank: int) -> None:
            spent[rank] = _wait_in_vain((first, second)[rank])

        _in_threads(2, body)
        assert 0.4 <= max(spent.values()) < 4.0
        failure = first.failure
        assert failure is not None
        assert (failure.awaited, failure.number) == (2, 0)
        assert failure.reason == _native.ExchangeFailure.Reason.silent
        assert str(exchange_error(second, "here")) == str(exchange_error(first, "here"))
        error = exchange_error(first, "in the exchange of latent")
        assert error.rank == 2
        assert error.what == (
            f"of 3 gave no sign of life for 0.4 s while rank {failure.waiter} waited for it in the "
            "exchange of latent"
        )
        # The end of the group: nobody waits any more.
        assert _wait_in_vain(first) < 0.3


def test_a_rank_that_is_alive_has_more_patience_and_an_end_of_it() -> None:
    with _segment(2) as segment:
        first, other = _join(segment, 0, timeout_s=0.2), _join(segment, 1)
        beats = first.heartbeat(1)
        spent = _wait_in_vain(first)
        assert other.heartbeat(1) > beats
        assert 0.2 * PATIENCE <= spent < 0.2 * PATIENCE + 4.0
        failure = other.failure
        assert failure is not None
        assert failure.reason == _native.ExchangeFailure.Reason.late
        assert "did not come within 2.4 s" in exchange_error(first, "here").what


def test_somebody_who_knows_ends_the_wait_at_once() -> None:
    with _segment(2) as segment:
        first, other = _join(segment, 0), _join(segment, 1)
        timer = threading.Timer(0.3, lambda: other.fail(1))
        timer.start()
        assert _wait_in_vain(first) < 4.0
        error = exchange_error(first, "here")
        assert str(error) == "Rank 1 of 2 was gone while rank 1 waited for it here"
        # The first failure stays.
        first.fail(0)
        assert exchange_error(first, "here").rank == 1
        with pytest.raises(IndexError, match="Rank 2 of 2 does not exist"):
            first.fail(2)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_and_a_stopped_process_are_named(blow: signal.Signals) -> None:
    context = multiprocessing.get_context("spawn")
    joined = context.Event()
    with _segment(2) as segment:
        other = context.Process(target=stand_by, args=(segment.path, segment.part_bytes, joined))
        other.start()
        first = _join(segment, 0, timeout_s=0.5)
        try:
            assert joined.wait(30)
            assert other.pid is not None
            os.kill(other.pid, blow)
            assert _wait_in_vain(first) < 4.0
            error = exchange_error(first, "here")
            assert error.rank == 1
            assert "gave no sign of life" in error.what
        finally:
            other.kill()
            other.join(10)


def test_no_name_is_left_of_the_memory() -> None:
    """Nor is there one while it is used."""
    with _segment(2) as segment:
        # Other programs of the machine have files of their own there.
        assert not any("kdecode" in name for name in os.listdir("/dev/shm"))
        assert os.readlink(segment.path) == "/memfd:kdecode-exchange (deleted)"
        first = _join(segment, 0)
        segment.close()
        segment.close()
        with pytest.raises(FileNotFoundError):
            _join(segment, 1)
        first.fail(1)
        # Of other tests, too, whose ends have not been collected.
        before = Path("/proc/self/maps").read_text().count("kdecode-exchange")
        assert before
        del first
        assert Path("/proc/self/maps").read_text().count("kdecode-exchange") == before - 1


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    with _segment(2, 4096) as segment:
        first = _join(segment, 0)
        with pytest.raises(ValueError, match="Rank 0 has joined this exchange before"):
            _join(segment, 0)
        with pytest.raises(ValueError, match="is another group's"):
            join(segment.path, 8192, Ranks(1, 2), num_threads=1, timeout_s=1.0)
        other = tmp_path / "file"
        other.write_bytes(b"x" * 100)
        with pytest.raises(ValueError, match="is another group's, or no shared memory"):
            join(str(other), 4096, Ranks(1, 2), num_threads=1, timeout_s=1.0)
        part = torch.zeros(1, 2048)
        with pytest.raises(ValueError, match=r"8192 bytes was given; .* up to 4096"):
            reduce_step(Pool(1), detect_isa(), first, part, part.bfloat16())
    with pytest.raises(ValueError, match="65 ranks"):
        Segment(65, 4096)
    with pytest.raises(ValueError, match="1 ranks"):
        Segment(1, 4096)
