"""Operations arrive whole and in order, and a broken channel says so."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from kdecode.parallel.channel import ChannelClosedError, Frames, Notes, Receiver, Sender, framed


def test_frames_do_not_depend_on_how_bytes_arrive() -> None:
    messages = [b"", b"a", b"bc" * 50_000]
    data = b"".join(framed(message) for message in messages)
    for step in (1, 7, 9, 65_536):
        frames, found = Frames(), []
        for at in range(0, len(data), step):
            frames.add(data[at : at + step])
            while (message := frames.take()) is not None:
                found.append(message)
        assert found == messages


def test_every_follower_gets_every_operation_in_order() -> None:
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    sender = Sender({rank: pair[0] for rank, pair in pairs.items()}, lambda: None)
    # Larger than what a socket takes at once.
    sent = [("run", list(range(8))), "x" * 1_000_000, None, {"kept": ((1, 2),)}]
    found: dict[int, list[object]] = {rank: [] for rank in pairs}

    def receive(rank: int) -> None:
        receiver = Receiver(pairs[rank][1])
        found[rank] = [receiver.receive() for _ in sent]
        with pytest.raises(ChannelClosedError):
            receiver.receive()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in pairs]
    for thread in threads:
        thread.start()
    for operation in sent:
        sender.send(operation)
    sender.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert list(found.values()) == [sent, sent, sent]


def test_a_follower_that_takes_nothing_is_looked_after() -> None:
    here, there = socket.socketpair()

    def check() -> None:
        raise TimeoutError("the group is broken")

    sender = Sender({1: here}, check)
    with pytest.raises(TimeoutError, match="the group is broken"):
        sender.send("x" * 10_000_000)
    there.close()


def test_a_follower_that_is_gone_closes_its_channel() -> None:
    here, there = socket.socketpair()
    there.close()
    with pytest.raises(ChannelClosedError):
        Sender({1: here}, lambda: None).send("anything")


def test_a_waiting_follower_can_be_interrupted() -> None:
    here, there = socket.socketpair()
    receiver = Receiver(there)
    timer = threading.Timer(0.1, receiver.interrupt)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(ChannelClosedError):
        receiver.receive()
    assert time.monotonic() - begin < 5
    here.close()
    receiver.close()
    receiver.interrupt()


def test_notes_go_both_ways_and_never_wait() -> None:
    one, two = (Notes(end) for end in socket.socketpair())
    one.write({"kind": "hello"})
    one.write({"kind": "beat"})
    assert two.read() == [{"kind": "hello"}, {"kind": "beat"}]
    for _ in range(100_000):
        two.write({"kind": "beat"})
    two.close()

    def read_to_the_end() -> None:
        while True:
            one.read()

    with pytest.raises(ChannelClosedError):
        read_to_the_end()
    one.write({"kind": "nobody reads this"})
    one.close()
