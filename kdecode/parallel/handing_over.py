"""A limit of the time that torch waits while ranks hand each other their memory.

torch does it over datagram sockets, of each process one, bound to a path with the process's number,
and waits in the kernel with Python's lock: where the sender is lost, no thread of this process can
say so, and nothing can end the process but a kill. A socket's own limits hold there, whoever set
them and through which descriptor. Owns finding that socket; of a torch that hands memory over by
other ways there is none, and nothing is limited.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Of torch/csrc/distributed/c10d/symm_mem: behind it is the number of the process.
_NAME = "symm_mem-"


def limit_sockets(seconds: float) -> int:
    """For every such socket that this process has now: who waits longer gets an error from torch.

    Returns how many there are.
    """
    # 0 would be none.
    whole, rest = divmod(max(1, int(seconds * 1_000_000)), 1_000_000)
    limit = struct.pack("ll", whole, rest)
    found = 0
    for own in _sockets():
        with own:
            if _hands_over(own):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                found += 1
    return found


def _sockets() -> Iterator[socket.socket]:
    """Those of this process, each through a descriptor of its own."""
    for path in Path("/proc/self/fd").iterdir():
        # Another thread may close any of them at any time, and so does the list its own.
        with suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode):
                yield socket.socket(fileno=os.dup(int(path.name)))


def _hands_over(own: socket.socket) -> bool:
    if own.family != socket.AF_UNIX or own.type != socket.SOCK_DGRAM:
        return False
    path = own.getsockname()
    return isinstance(path, str) and Path(path).name == f"{_NAME}{os.getpid()}"
