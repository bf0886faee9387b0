# SPDX-License-Identifier: Apache-2.0
"""What a program and its writer process say to each other, over one socket.

A frame is the length of a message and the message. A descriptor travels with the length. No side
trusts the end of the stream alone: a process that was forked may hold the other end open.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from shardkeep.failures import Failure

__all__ = [
    "Channel",
    "Done",
    "Failed",
    "Forget",
    "Forgotten",
    "Gone",
    "Hello",
    "Job",
    "Memory",
    "Message",
    "Moved",
    "There",
]

LOOK_MS = 1000
"""Between two looks at whether the other side is alive."""
PIECE = 1 << 20
"""Most bytes that are sent or received at once."""
MOST_DESCRIPTORS = 4
_LENGTH = 8
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program may have made SIGPIPE deadly, and must not die of its writer's death."""
_AT_ONCE: int = _NO_SIGNAL | getattr(socket, "MSG_DONTWAIT", 0)


class Memory(msgspec.Struct, frozen=True, tag=True):
    """To the process: this is the memory from now on. Its descriptor comes along."""

    nbytes: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """To the process: let go of the memory, and say so."""


class Job(msgspec.Struct, frozen=True, tag=True):
    """To the process: do this. Nothing of the memory is there yet."""

    work: str
    """The function, as `module:name`."""
    data: bytes
    """What it is told."""
    unit: int
    """Bytes of memory that arrive together."""


class There(msgspec.Struct, frozen=True, tag=True):
    """To the process: so many bytes of the memory are there."""

    below: int
    settled: bool
    """Whether no thread of the program copies any more."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From the process: it runs."""


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """From the process: it has let go of the memory."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """From the process: progress."""

    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """From the process: the job is done."""

    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the process: the job is not done."""

    failure: Failure
    errno: int | None


Message: TypeAlias = Memory | Forget | Job | There | Hello | Forgotten | Moved | Done | Failed


class Gone(Exception):
    """The other side is."""


class Channel:
    """One end of the socket; one thread receives, any may send."""

    def __init__(self, end: socket.socket, is_alive: Callable[[], bool]) -> None:
        """Owns the socket. `is_alive` tells of the other side, and is asked every second."""
        self._socket = end
        self._is_alive = is_alive
        self._sending = threading.Lock()
        self._has_come = select.poll()
        self._has_come.register(end, select.POLLIN)
        self._has_room = select.poll()
        self._has_room.register(end, select.POLLOUT)
        self._decoder = msgspec.msgpack.Decoder(Message)

    def send(
        self,
        message: Message,
        descriptor: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a whole message.

        Waits while the other side takes none, and calls `meanwhile` every second, which may raise:
        half of the message may have been sent then, and no other can be.
        """
        data = msgspec.msgpack.encode(message)
        length = len(data).to_bytes(_LENGTH, "little")
        try:
            with self._sending:
                self._write(length, [] if descriptor is None else [descriptor], meanwhile)
                self._write(data, [], meanwhile)
        except OSError as error:
            raise Gone from error

    def _write(self, data: bytes, descriptors: list[int], meanwhile: Callable[[], None]) -> None:
        left = memoryview(data)
        while left:
            if not self._has_room.poll(LOOK_MS):
                meanwhile()
                if not self._is_alive():
                    raise Gone
                continue
            with contextlib.suppress(BlockingIOError):
                if descriptors:
                    sent = socket.send_fds(self._socket, [left], descriptors, _AT_ONCE)
                else:
                    sent = self._socket.send(left[:PIECE], _AT_ONCE)
                left, descriptors = left[sent:], []

    def has_message(self) -> bool:
        """Whether `receive` finds something, be it the end."""
        return bool(self._has_come.poll(0))

    def receive(self, meanwhile: Callable[[], None] = lambda: None) -> tuple[Message, list[int]]:
        """The next message, and the descriptors that came with it.

        Waits for it, and calls `meanwhile` every second, which may raise.
        """
        descriptors: list[int] = []
        try:
            length = int.from_bytes(self._read(_LENGTH, descriptors, meanwhile), "little")
            data = self._read(length, descriptors, meanwhile)
            return self._decoder.decode(data), descriptors
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise Gone from error
            raise

    def _read(self, nbytes: int, descriptors: list[int], meanwhile: Callable[[], None]) -> bytes:
        parts = []
        while nbytes:
            while not self._has_come.poll(LOOK_MS):
                meanwhile()
                # What it said last may have come between the two looks.
                if not self._is_alive() and not self.has_message():
                    raise Gone
            size = min(nbytes, PIECE)
            part, came, _, _ = socket.recv_fds(self._socket, size, MOST_DESCRIPTORS)
            descriptors.extend(came)
            if not part:
                raise Gone
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Let the other side see the end."""
        with contextlib.suppress(OSError):
            self._socket.close()
