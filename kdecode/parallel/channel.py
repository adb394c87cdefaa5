"""Messages between two processes through a connected socket: whole, and in the order sent.

Owns the framing, and the operations that rank 0 hands to every other rank. A socket serves one host
(a pair of Unix sockets) and several (TCP) alike, wakes its reader at once, and tells by itself that
the process at its other end is gone. Operations are pickled, and only ever go from rank 0 to
processes that run its code; what others send is JSON. Does not know what operations mean, nor whose
fault a broken channel is.
"""

from __future__ import annotations

import json
import pickle
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 16
# How long a sender waits for room before it looks whether its reader is still there.
_LOOK_MS = 50


class ChannelClosedError(OSError):
    """The process at the other end has ended, or has ended the channel."""


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Takes the bytes that arrive apart into the messages that were sent."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> bytes | None:
        """The next message, as soon as all of it is there."""
        if len(self._bytes) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        message = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return message


class Sender:
    """Rank 0's end: hands every operation to every follower, or says whose channel broke.

    followers: the socket of each. check: called now and then while a follower takes nothing; what
    it raises ends the wait. Methods must not be called by two threads at once.
    """

    def __init__(self, followers: Mapping[int, socket.socket], check: Callable[[], None]) -> None:
        self._followers = dict(followers)
        self._check = check

    def send(self, operation: object) -> None:
        """Raises ChannelClosedError, or what ``check`` raises; a part of the ranks has it then."""
        data = framed(pickle.dumps(operation, pickle.HIGHEST_PROTOCOL))
        for follower in self._followers.values():
            _send_whole(follower, data, self._check)

    def close(self) -> None:
        """Followers see the end behind the last operation."""
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()


class Receiver:
    """A follower's end."""

    def __init__(self, leader: socket.socket) -> None:
        self._leader = leader
        self._frames = Frames()

    def receive(self) -> Any:
        """The next operation; waits for it without a limit. Raises ChannelClosedError."""
        while (message := self._frames.take()) is None:
            data = _read(self._leader)
            if not data:
                raise ChannelClosedError("Rank 0 sends no more operations.")
            self._frames.add(data)
        return pickle.loads(message)

    def interrupt(self) -> None:
        """Ends the wait of another thread in `receive`, and every later one."""
        try:
            self._leader.shutdown(socket.SHUT_RD)
        except OSError:
            # The other end has closed it already.
            return

    def close(self) -> None:
        self._leader.close()


class Notes:
    """Small messages in both directions, of which none is worth waiting for: JSON objects."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._frames = Frames()

    def fileno(self) -> int:
        return self._peer.fileno()

    def write(self, note: Mapping[str, Any]) -> None:
        """Lost where the other end is gone, or has taken nothing for minutes."""
        try:
            self._peer.send(framed(json.dumps(note).encode()), socket.MSG_DONTWAIT)
        except OSError:
            return

    def read(self) -> list[dict[str, Any]]:
        """What has arrived. Raises ChannelClosedError at its end, where the other end is gone."""
        data = _read(self._peer)
        if not data:
            raise ChannelClosedError("The other end is gone.")
        self._frames.add(data)
        notes = []
        while (message := self._frames.take()) is not None:
            notes.append(json.loads(message))
        return notes

    def close(self) -> None:
        self._peer.close()


def _read(peer: socket.socket) -> bytes:
    """Waits for some bytes; none where the other end is gone, however it went."""
    try:
        return peer.recv(_READ_BYTES)
    except OSError:
        return b""


def _send_whole(peer: socket.socket, data: bytes, check: Callable[[], None]) -> None:
    """Raises ChannelClosedError, or what ``check`` raises while there is no room."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[peer.send(rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            _wait_for_room(peer)
            check()
        except OSError as error:
            raise ChannelClosedError(str(error)) from error


def _wait_for_room(peer: socket.socket) -> None:
    room = select.poll()
    room.register(peer, select.POLLOUT)
    room.poll(_LOOK_MS)
