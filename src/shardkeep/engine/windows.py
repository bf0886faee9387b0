# SPDX-License-Identifier: Apache-2.0
"""Windows: memory that one rank fills, and that other ranks on its machine look into.

It is a file in memory without a name, found through the process that made it; nothing is left of it
when all who have it are gone, however they ended. Its front has counters, by which those who fill
and those who look follow each other without a message.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref

import msgspec
import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.columns import Ints
from shardkeep.engine.pages import mapped
from shardkeep.hosts import host_name
from shardkeep.stores.local import above_stdio

__all__ = ["DONE", "FILLED", "LEFT", "TAKEN", "Address", "Window", "fence"]

FRONT = 4096
"""Bytes before the blocks, of which the first are the token."""
FILLED, LEFT, TAKEN = 2, 3, 8
"""Counters, in blocks from the first: up to which all are filled in, whether no more will be, and
from here on, for each neighbour, which it needs next; -1 for one that has not looked yet."""
DONE = 1 << 62
"""Of a neighbour that will take nothing more."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a window is found."""

    machine: str
    """Processes of one machine, and of one name space, see each other's windows."""
    pid: int
    """Of who made it."""
    fd: int
    """Of the memory, there."""
    token: bytes
    """At its begin: another process may have the number by now."""

    def is_alive(self) -> bool:
        """Whether whoever made it still has it."""
        return os.path.lexists(f"/proc/{self.pid}/fd/{self.fd}")


class Window:
    """Memory of one rank, mapped by it and by those it passes blocks on to."""

    def __init__(self, memory: Bytes, address: Address, fd: int = -1) -> None:
        """Of memory that is mapped; with a descriptor, for whoever made it."""
        self.address = address
        self.counters: Ints = memory[:FRONT].view(np.int64)
        self.ring: Bytes = memory[FRONT:]
        self._closing = None if fd < 0 else weakref.finalize(self, os.close, fd)

    @classmethod
    def make(cls, nbytes: int, ranks: int) -> Window | None:
        """A window for so many neighbours, with room for so many bytes; None where there is none.

        Memory is taken when it is written to.
        """
        machine = _machine()
        if machine is None:
            return None
        import fcntl  # not on every system

        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            fd = above_stdio(os.memfd_create("shardkeep-window", flags))
        except OSError:
            return None
        try:
            token = secrets.token_bytes(16)
            os.ftruncate(fd, FRONT + nbytes)
            os.pwrite(fd, token, 0)
            # Whoever maps it may then read all of it, whatever happens to the one who made it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            made = cls(mapped(fd, FRONT + nbytes), Address(machine, os.getpid(), fd, token), fd)
        except OSError:
            os.close(fd)
            return None
        made.counters[TAKEN : TAKEN + ranks] = -1
        return made

    @classmethod
    def look_into(cls, address: Address) -> Window | None:
        """Another rank's window; None if it cannot be reached, or is gone."""
        with contextlib.suppress(OSError):
            fd = above_stdio(
                os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
            )
            try:
                if os.pread(fd, len(address.token), 0) == address.token:
                    return cls(mapped(fd, os.fstat(fd).st_size), address)
            finally:
                os.close(fd)
        return None

    def close(self) -> None:
        """Nobody can look into it any more who has not done so yet."""
        if self._closing is not None:
            self._closing()


_LOCK = threading.Lock()


def fence() -> None:
    """What this thread did to memory before is seen by others before what it does after."""
    # To let go of a lock and to take it again are barriers, whatever the machine.
    for _ in range(2):
        with _LOCK:
            pass


def _machine() -> str | None:
    """The same for processes that can open each other's memory."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return f"{host_name()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
