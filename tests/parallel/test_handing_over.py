"""Ranks that hand each other their memory as torch does: with Python's lock, over sockets.

Each is a process with a pretended GPU; torch's own part is `pretended_gpus.HandedMemory`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import rank_follow
import torch
from pretend_device import pretend_cuda
from pretended_gpus import PATCHES, SYMMETRIC_PATCHES, HandedMemory, follow_handing_over

from kdecode.parallel import launch, symmetric
from kdecode.parallel.group import Group
from kdecode.parallel.handing_over import limit_sockets
from kdecode.parallel.ranks import RankError


@pytest.fixture
def folder() -> Iterator[str]:
    """Of a name that is short enough for the path of a socket."""
    with TemporaryDirectory() as name:
        yield name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process, which is rank 0, has a pretended GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for patch in (*PATCHES, *SYMMETRIC_PATCHES):
        monkeypatch.setattr(*patch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pretend_cuda():
        yield
    torch.set_num_threads(threads)


@contextmanager
def three_ranks(monkeypatch: pytest.MonkeyPatch, folder: str, fault: str) -> Iterator[Group]:
    """Rank 1 has the fault while memory is handed over."""
    faulty = 1
    monkeypatch.setattr(symmetric, "TorchMemory", partial(HandedMemory, folder, faulty, fault))
    group = launch.start(3, follow_handing_over, (folder, faulty, fault), timeout_s=4.0)
    try:
        carried_out(group, "use the GPU", "symmetric")
        yield group
    finally:
        group.close()


def carried_out(group: Group, *operation: object) -> torch.Tensor | None:
    group.send(operation)
    return rank_follow.carry_out(group, *operation)  # type: ignore[arg-type]


@pytest.mark.interpreter
def test_ranks_read_the_memory_that_they_were_handed(
    gpu: None, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    with three_ranks(monkeypatch, folder, "") as group:
        found = carried_out(group, "reduce on the GPU", 3, 5)
    parts = [rank_follow.part_of(rank, 3, 5) for rank in range(3)]
    assert found is not None
    assert torch.equal(found, (parts[0] + parts[1] + parts[2]).to(torch.bfloat16))
    # With it ranks would also wait inside of the driver, of which nobody knows a limit.
    of_environment = ctypes.CDLL(None).getenv
    of_environment.restype = ctypes.c_char_p
    assert of_environment(b"TORCH_SYMM_MEM_DISABLE_MULTICAST") == b"1"


@pytest.mark.interpreter
@pytest.mark.parametrize(("fault", "words"), [("kill", "died with signal 9"), ("stop", "stopped")])
def test_a_rank_that_is_lost_while_memory_is_handed_over_is_named(
    gpu: None, monkeypatch: pytest.MonkeyPatch, folder: str, fault: str, words: str
) -> None:
    """Without a limit the others, this process among them, would wait for ever."""
    with (
        pytest.raises(RankError, match=f"Rank 1 of 3.*{words}"),
        three_ranks(monkeypatch, folder, fault),
    ):
        pass


def test_the_socket_over_which_memory_comes_has_a_limit_and_no_other(folder: str) -> None:
    ours = f"symm_mem-{os.getpid()}"
    places = (
        (socket.SOCK_DGRAM, f"{folder}/{ours}"),
        (socket.SOCK_DGRAM, f"{folder}/{ours}0"),
        (socket.SOCK_STREAM, f"{folder}/streams/{ours}"),
    )
    Path(folder, "streams").mkdir()
    with ExitStack() as stack:
        ends = [stack.enter_context(socket.socket(socket.AF_UNIX, kind)) for kind, _ in places]
        for end, (_, path) in zip(ends, places, strict=True):
            end.bind(path)
        assert limit_sockets(0.125) == 1
        limits = [end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) for end in ends]
        assert [struct.unpack("ll", limit)[0] for limit in limits] == [0, 0, 0]
        assert [struct.unpack("ll", limit)[1] > 0 for limit in limits] == [True, False, False]
        # As torch receives: it gets the lock back by itself.
        kernel = ctypes.PyDLL(None, use_errno=True)
        assert kernel.recv(ends[0].fileno(), ctypes.create_string_buffer(2), 2, 0) == -1
        assert ctypes.get_errno() == errno.EAGAIN


@pytest.fixture
def default_timeout() -> Iterator[None]:
    """Of sockets that Python makes, whoever has opened what they are made of."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(2.0)
    yield
    socket.setdefaulttimeout(before)


def test_no_socket_becomes_another_kind_of_socket(folder: str, default_timeout: None) -> None:
    """Also with a default timeout, by which Python opens sockets that do not block."""
    with ExitStack() as stack:
        handing = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        handing.bind(f"{folder}/symm_mem-{os.getpid()}")
        ends = [handing, *map(stack.enter_context, socket.socketpair())]
        for end in ends:
            os.set_blocking(end.fileno(), True)
        flags = [fcntl.fcntl(end, fcntl.F_GETFL) for end in ends]
        descriptors = os.listdir("/proc/self/fd")
        assert limit_sockets(1.0) == 1
        assert [fcntl.fcntl(end, fcntl.F_GETFL) for end in ends] == flags
        assert [os.get_blocking(end.fileno()) for end in ends] == [True, True, True]
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_every_descriptor_of_the_socket_counts(folder: str) -> None:
    """Also one to a path with spaces, which is gone by now."""
    path = Path(folder, f"a folder/symm_mem-{os.getpid()}")
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as handing, handing.dup():
        handing.bind(str(path))
        path.unlink()
        assert limit_sockets(1.0) == 2


def test_a_process_without_such_a_socket_is_left_as_it_is() -> None:
    assert limit_sockets(1.0) == 0
