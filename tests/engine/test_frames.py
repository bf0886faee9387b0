"""Messages between a program and its writer process."""

import os
import socket
import threading

import pytest

from shardkeep.engine import frames
from shardkeep.engine.frames import Channel, Done, Gone, Hello, Job, Memory, There
from shardkeep.engine.process import can_start

pytestmark = pytest.mark.skipif(not can_start(), reason="no descriptors over sockets")


@pytest.fixture
def alive():
    return [True]


@pytest.fixture
def ends(alive):
    pair = [Channel(end, lambda: alive[0]) for end in socket.socketpair()]
    yield pair
    for channel in pair:
        channel.close()


@pytest.mark.parametrize("size", [0, 1, 100, frames.PIECE, 5 * frames.PIECE + 3])
def test_messages_of_any_size_arrive_in_order(ends, size):
    here, there = ends
    sent = [Job("a:b", os.urandom(size), 8), There(5, True), Done(b"x" * size), Hello()]
    sender = threading.Thread(target=lambda: [here.send(message) for message in sent])
    sender.start()
    assert [there.receive() for _ in sent] == [(message, []) for message in sent]
    sender.join()
    assert not there.has_message()


def test_a_descriptor_comes_with_its_message(ends):
    here, there = ends
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    here.send(Hello())
    here.send(Memory(6), fd)
    here.send(There(6, True))
    os.close(fd)
    assert there.receive() == (Hello(), [])
    message, (got,) = there.receive()
    assert message == Memory(6)
    assert os.pread(got, 6, 0) == b"shared"
    os.close(got)
    assert there.receive() == (There(6, True), [])


def test_the_end_is_told_from_silence(ends):
    here, there = ends
    here.send(There(1, True))
    here.close()
    assert there.receive() == (There(1, True), [])
    with pytest.raises(Gone):
        there.receive()
    with pytest.raises(Gone):
        there.send(Hello())


def test_who_is_dead_is_gone_even_if_its_end_is_open(ends, alive, monkeypatch):
    monkeypatch.setattr(frames, "LOOK_MS", 20)
    here, there = ends
    here.send(There(1, True))
    alive[0] = False
    assert there.receive() == (There(1, True), []), "what it said last still counts"
    with pytest.raises(Gone):
        there.receive()
    with pytest.raises(Gone):  # nobody takes it
        there.send(Done(bytes(8 << 20)))


@pytest.mark.parametrize("with_descriptor", [False, True])
def test_who_waits_for_room_can_stop_waiting(ends, monkeypatch, with_descriptor):
    monkeypatch.setattr(frames, "LOOK_MS", 20)
    here, _ = ends
    looks = []

    def meanwhile():
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt

    descriptor = os.memfd_create("test") if with_descriptor else None

    def send_all():
        while True:  # nobody takes them
            here.send(Memory(1), descriptor, meanwhile)

    with pytest.raises(KeyboardInterrupt):
        send_all()
    if descriptor is not None:
        os.close(descriptor)
    assert len(looks) == 3
