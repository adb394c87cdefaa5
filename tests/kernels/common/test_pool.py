"""The thread pool and the native program: nothing is lost, doubled or out of order."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_a_forked_child_makes_its_own_pool():
    """The child has none of the threads: it is told so, may drop the pool, and hangs nowhere."""
    pools = [Pool(2, can_oversubscribe=True)]
    assert _native.pool_self_test(pools[0], 3, 1, 1, 4) == 0
    child = os.fork()
    if child == 0:
        try:
            _native.pool_self_test(pools[0], 1, 1, 1, 1)
        except RuntimeError as error:
            is_told = "has to make its own" in str(error)
            pools.clear()
            own = Pool(2, can_oversubscribe=True)
            os._exit(0 if is_told and _native.pool_self_test(own, 3, 2, 2, 8) == 0 else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _native.pool_self_test(pools[0], 3, 1, 1, 4) == 0


def _run_python(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a hang or an abort cannot take the tests along with."""
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_no_wake_up_is_lost_while_another_process_has_the_cores(num_threads):
    """Threads lose their cores in the middle of phases, and sleep between jobs."""
    code = f"""
import time
from kdecode.kernels.common import _native
pool = _native.Pool({num_threads}, can_oversubscribe=True)
faults = 0
for job in range(40):
    if job % 8 == 0:
        time.sleep(0.004)
    faults += _native.pool_self_test(pool, 2, 3, 3, 20)
print(faults)
"""
    busy = [subprocess.Popen([sys.executable, "-P", "-c", "while True: pass"]) for _ in range(2)]
    try:
        done = _run_python(code, timeout_s=120)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_a_pool_that_gets_no_threads_is_an_error_and_no_abort():
    code = """
import resource
from kdecode.kernels.common import _native
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), used + (20 << 20)))
try:
    _native.Pool(64, can_oversubscribe=True)
except RuntimeError as error:
    print("refused", error)
"""
    done = _run_python(code, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused")


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
