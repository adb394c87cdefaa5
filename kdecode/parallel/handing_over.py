"""A limit of the time that torch waits while ranks hand each other their memory.

torch does it over datagram sockets, of each process one, bound to a path with the process's number,
and waits in the kernel with Python's lock: where the sender is lost, no thread of this process can
say so, and nothing can end the process but a kill. A socket's own limits hold there, whoever set
them. Owns finding that socket by its path, and touches no other one of the process, which belong to
whoever opened them; of a torch that hands memory over by other ways there is none, and nothing is
limited.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

# Of torch/csrc/distributed/c10d/symm_mem: behind it is the number of the process.
_NAME = "symm_mem-"
# In columns of the kernel's list: type, inode, path.
_TYPE, _INODE, _PATH = 4, 6, 7
_DATAGRAMS = f"{socket.SOCK_DGRAM:04x}"


def limit_sockets(seconds: float) -> int:
    """For every such socket that this process has now: who waits longer gets an error from torch.

    Returns how many descriptors of them there are. For the thread in which torch has them, so that
    nobody closes them meanwhile.
    """
    # 0 would be none.
    whole, rest = divmod(max(1, int(seconds * 1_000_000)), 1_000_000)
    limit = struct.pack("ll", whole, rest)
    links = _links()
    found = [int(name) for name in os.listdir("/proc/self/fd") if _link(name) in links]
    for descriptor in found:
        _set_option(descriptor, socket.SO_RCVTIMEO, limit)
        _set_option(descriptor, socket.SO_SNDTIMEO, limit)
    return len(found)


def _links() -> set[str]:
    """As what descriptors of them appear in the list of a process: sockets are told by inode."""
    links = set()
    for line in Path("/proc/net/unix").read_text("utf-8", "surrogateescape").split("\n"):
        # A path may have spaces, and sockets without one end before.
        columns = line.split(maxsplit=_PATH)
        if len(columns) <= _PATH or columns[_TYPE] != _DATAGRAMS:
            continue
        if Path(columns[_PATH]).name == f"{_NAME}{os.getpid()}":
            links.add(f"socket:[{columns[_INODE]}]")
    return links


def _link(descriptor: str) -> str | None:
    """None for one that is closed by now: by another thread, or that of the list itself."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None


def _set_option(descriptor: int, option: int, value: bytes) -> None:
    """Not through a socket of Python, which would make it block or not by a default of its own."""
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.setsockopt(descriptor, socket.SOL_SOCKET, option, value, len(value)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Option {option} of a socket cannot be set: {os.strerror(code)}.")
