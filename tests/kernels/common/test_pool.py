"""The thread pool and the native program: nothing is lost, doubled or out of order."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import Pool, Program, available_cores, supported_isas

# More splits without a barrier than the pool has counters (8), fewer, and exactly as many.
SHAPES = ((2000, 1, 1, 3), (300, 4, 3, 40), (100, 3, 8, 5), (100, 2, 21, 7))


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize(("jobs", "phases", "splits", "items"), SHAPES)
def test_every_item_is_handed_out_once(num_threads, jobs, phases, splits, items):
    # With fewer cores than threads, waiting threads must give way.
    pool = Pool(num_threads, can_oversubscribe=True)
    jobs = jobs if num_threads <= available_cores() else jobs // 10
    assert _native.pool_self_test(pool, jobs, phases, splits, items) == 0


def test_sleeping_threads_wake_up():
    pool = Pool(2, can_oversubscribe=True)
    for _ in range(20):
        time.sleep(0.003)  # longer than the threads spin and yield
        assert _native.pool_self_test(pool, 1, 1, 1, 10) == 0


def test_callers_take_turns():
    pool = Pool(2, can_oversubscribe=True)
    faults = []
    callers = [
        threading.Thread(target=lambda: faults.append(_native.pool_self_test(pool, 200, 1, 2, 10)))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert faults == [0, 0, 0]


def test_pools_come_and_go():
    for _ in range(50):
        pool = Pool(2, can_oversubscribe=True)
        assert _native.pool_self_test(pool, 1, 1, 1, 4) == 0
        del pool
    for _ in range(50):
        Pool(2, can_oversubscribe=True)


def test_number_of_threads_is_checked():
    cores = available_cores()
    with pytest.raises(ValueError, match=f"from 1 to {cores}"):
        Pool(cores + 1)
    with pytest.raises(ValueError, match="A pool of 0 threads"):
        Pool(0)


def test_a_forked_child_is_told_to_make_its_own_pool():
    pool = Pool(1)
    child = os.fork()
    if child == 0:
        try:
            _native.pool_self_test(pool, 1, 1, 1, 1)
        except RuntimeError as error:
            os._exit(0 if "has to make its own" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_refuses_what_it_does_not_know():
    pool = Pool(1)
    with pytest.raises(ValueError, match="not supported here"):
        Program(pool, "sse9")
    program = Program(pool, supported_isas()[0])
    with pytest.raises(ValueError, match='no native step named "juggle"'):
        program.add("juggle", object())
    with pytest.raises(TypeError, match='Step "embed" takes a EmbedArgs'):
        program.add("embed", object())
    with pytest.raises(IndexError, match=r"Steps \[0, 1\) of a program of 0 steps"):
        program.run(0, 1)
    program.run(0, 0)


def test_the_read_loop_is_timed_pass_by_pass_and_bounded_by_reason():
    memory = torch.ones(8 << 20, dtype=torch.uint8)
    seconds = _native.time_stream(Pool(1), memory.data_ptr(), memory.numel(), 3)
    assert len(seconds) == 3
    assert all(1e8 < memory.numel() / second < 1e13 for second in seconds)
    with pytest.raises(ValueError, match="multiple of 256"):
        _native.time_stream(Pool(1), memory.data_ptr(), 100, 1)
