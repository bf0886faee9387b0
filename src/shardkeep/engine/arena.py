# SPDX-License-Identifier: Apache-2.0
"""The arena: memory for one staged state, taken once and used by save after save.

Taking memory is slow: pages are zeroed on first touch, and a device must be told of each. So the
arena only grows, and what it has is kept until it is closed. It comes in segments, which are made
ready one after the other: the first can be filled while the next is prepared.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np

from shardkeep.arrays import Bytes, Staging
from shardkeep.engine.budget import available_memory
from shardkeep.engine.pages import HUGE_PAGE, mapped, page_aligned
from shardkeep.engine.parallel import run_in_order
from shardkeep.memory import address_of
from shardkeep.stores.local import above_stdio

__all__ = ["SEGMENT", "Arena", "Borrower", "above_stdio"]

SEGMENT = 1 << 30
"""Bytes made ready at once. A copy of a device must not reach from one segment into another."""
SPARE = 16
"""One part in so many that is taken in addition: a state that grows a little still fits."""
_POPULATE_WRITE = 23
"""Linux 5.14's advice to touch pages, for several threads at once; others touch them by hand."""


class Borrower(Protocol):
    """Has memory of an arena that this process alone can't give back."""

    def let_go(self) -> None:
        """Give it back; done on return."""


class Arena:
    """One stretch of memory, private or shared with a process that is given `fd`."""

    def __init__(self, *, shared: bool = False) -> None:
        """Nothing is taken yet."""
        self.shared = shared
        self.fd = -1
        """Of the memory, where it is shared."""
        self.version = 0
        """Another number whenever it is other memory."""
        self.memory: Bytes = np.empty(0, np.uint8)
        """All of it."""
        self.borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
        """Asked to let go before the memory goes."""
        self._owner = os.getpid()
        """A process that is forked must not write into memory that both of them share."""
        self._touched = 0
        self._pinned: list[Callable[[], None]] = []
        self._staging: Staging | None = None
        # For one that is dropped as well. At the end of the program the system does it, and a save
        # may still go on.
        self._unpinning: weakref.finalize[..., Arena] | None = None
        self._closing: weakref.finalize[..., Arena] | None = None

    def reserve(self, nbytes: int) -> bool:
        """Make it at least so large, whatever was in it; says whether it is other memory now."""
        if nbytes <= len(self.memory) and self._owner == os.getpid():
            return False
        self.close()
        # To be refused is better than to be killed for it by the system, in the middle of a copy.
        available = available_memory()
        if available is not None and nbytes > available:
            raise MemoryError(
                f"a snapshot of this state takes {nbytes} bytes of host memory on this rank, and "
                f"{available} are available; use save, which needs no copy of the state"
            )
        self._owner = os.getpid()
        self.version += 1
        nbytes = -(-(nbytes + nbytes // SPARE) // HUGE_PAGE) * HUGE_PAGE
        if self.shared:
            self.fd = _shared_file()
            self._closing = weakref.finalize(self, os.close, self.fd)
            self._closing.atexit = False
            try:
                os.ftruncate(self.fd, nbytes)
                self.memory = mapped(self.fd, nbytes)
            except BaseException:
                self.close()
                raise
        else:
            self.memory = page_aligned(nbytes)
        return True

    def is_ready(self, nbytes: int, staging: Staging | None) -> bool:
        """Whether the first bytes have been touched, and can be copied to by a device."""
        if nbytes > len(self.memory):
            return False
        if staging is None:
            return self._touched >= nbytes
        return self._staging is staging and len(self._pinned) * SEGMENT >= nbytes

    def prepare(self, nbytes: int, staging: Staging | None, threads: int) -> None:
        """Make the first bytes ready: touched by so many threads, and known to the device."""
        nbytes = min(-(-nbytes // HUGE_PAGE) * HUGE_PAGE, len(self.memory))
        if staging is not None and self._staging is not staging:
            self._unpin()
            self._staging = staging
        while self._touched < nbytes:
            end = min((self._touched // SEGMENT + 1) * SEGMENT, nbytes)
            _touch(self.memory[self._touched : end], threads)
            self._touched = end
        if staging is not None:
            if self._unpinning is None:
                self._unpinning = weakref.finalize(
                    self, _unpin, self._pinned, self.memory, os.getpid()
                )
                self._unpinning.atexit = False
            while len(self._pinned) * SEGMENT < nbytes:
                low = len(self._pinned) * SEGMENT
                # All of a segment is told at once, so all of it is touched.
                high = min(low + SEGMENT, len(self.memory))
                if self._touched < high:
                    _touch(self.memory[self._touched : high], threads)
                    self._touched = high
                self._pinned.append(staging.pin(self.memory[low:high]))

    def note_filled(self, nbytes: int) -> None:
        """The first bytes have been written to, and so touched."""
        self._touched = max(self._touched, nbytes)

    def _unpin(self) -> None:
        unpinning, self._unpinning = self._unpinning, None
        self._pinned, self._staging = [], None
        if unpinning is not None:
            unpinning()

    def close(self) -> None:
        """Let go of the memory; views of it that somebody holds keep it until they go."""
        try:
            self._unpin()
        finally:
            self._touched = 0
            self.memory = np.empty(0, np.uint8)
            self.fd = -1
            closing, self._closing = self._closing, None
            if closing is not None:
                closing()
            borrowers, self.borrowers = list(self.borrowers), weakref.WeakSet()
            for borrower in borrowers:
                borrower.let_go()


def _unpin(pinned: list[Callable[[], None]], memory: Bytes, owner: int) -> None:
    """Have the device forget memory, which is given so that it is there until then."""
    # A process that is forked has no device.
    if owner == os.getpid():
        with contextlib.ExitStack() as all_of_them:
            for unpin in pinned:
                all_of_them.callback(unpin)


def _shared_file() -> int:
    """A file in memory without a name."""
    return above_stdio(os.memfd_create("shardkeep-arena"))


def _touch(memory: Bytes, threads: int) -> None:
    """Have the system provide all pages now."""
    part = max(HUGE_PAGE, -(-len(memory) // max(1, threads) // HUGE_PAGE) * HUGE_PAGE)
    advise = _populate if sys.platform == "linux" else None

    def touch(low: int) -> None:
        piece = memory[low : low + part]
        if advise is None or not advise(piece):
            piece[:: mmap.PAGESIZE] |= 0

    run_in_order(range(0, len(memory), part), touch, threads, alone_here=True)


def _populate(memory: Bytes) -> bool:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = address_of(memory)
    return bool(call(begin, len(memory), _POPULATE_WRITE) == 0)
