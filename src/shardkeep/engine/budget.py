# SPDX-License-Identifier: Apache-2.0
"""One budget of memory for payload, handed out as equal buffers.

A task that holds a buffer never waits for a second one, so that tasks cannot wait for each other in
a circle.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import SupportsIndex

from shardkeep.arrays import Bytes, Staging
from shardkeep.engine.digests import CONTENT_PIECE
from shardkeep.engine.pages import HUGE_PAGE, page_aligned

__all__ = [
    "KEPT",
    "MINIMUM_BUDGET",
    "BufferPool",
    "Spares",
    "check_budget",
    "default_budget",
    "io_threads",
    "usable_cores",
]

MINIMUM_BUDGET = 8 << 20
MAXIMUM_DEFAULT = 1 << 30
UNKNOWN = 4 << 30
"""Taken to be available where the system does not say."""
LARGEST_UNIT = 4 << 20
SHARE = 4 << 20
"""The least one thread can work with."""
KEPT = 16
"""One part of a budget in so many may be kept for others."""


def usable_cores(ranks_on_host: int = 1) -> int:
    """This process's share of the machine."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // max(1, ranks_on_host))


def io_threads(ranks_on_host: int = 1) -> int:
    """How many threads move bytes: few, as each takes the interpreter's lock for every block that
    it digests, and fewer where ranks share the machine."""
    return min(4, usable_cores(ranks_on_host))


def available_memory() -> int | None:
    """Bytes that can still be allocated, under the control group's limit where there is one.

    None where the system does not say.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for folder, limit, used in _GROUPS:
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup", folder)
            free = int((group / limit).read_text()) - int((group / used).read_text())
            found.append(free + _cached_by(group))
    return max(0, min(found)) if found else None


_GROUPS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where the limits of control groups are, of both versions."""


def _cached_by(group: Path) -> int:
    """What a group uses for files it can read again: it is given up for anything else."""
    with contextlib.suppress(OSError, ValueError):
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))
    return 0


def default_budget(ranks_on_host: int = 1) -> int:
    """A tenth of what is available, shared by the ranks of this host; 8 MiB to 1 GiB."""
    available = available_memory()
    share = (UNKNOWN if available is None else available) // 10 // max(1, ranks_on_host)
    return max(MINIMUM_BUDGET, min(MAXIMUM_DEFAULT, share))


def checked_budget(memory_budget: int | None, ranks_on_host: int = 1) -> int:
    """The caller's budget, or the default; too small a one is a `ValueError`."""
    if memory_budget is None:
        return default_budget(ranks_on_host)
    check_budget(memory_budget, MINIMUM_BUDGET)
    return memory_budget


def check_budget(memory_budget: int, least: int) -> None:
    """It is a number of bytes, and enough of them."""
    if not isinstance(memory_budget, SupportsIndex):
        raise TypeError(f"memory_budget is {memory_budget!r}; use a whole number of bytes")
    if memory_budget < least:
        raise ValueError(f"memory_budget is {memory_budget} bytes; at least {least} are needed")


class Spares:
    """Buffers of one size that outlive their pool, for the next one: fresh memory is cleared page
    by page, and in a virtual machine may first have to be asked of the host.

    A list does each of this at once, so that there is no lock for a fork to leave taken.
    """

    def __init__(self, pools: int = 1) -> None:
        """So many pools that are alike are in use at a time."""
        self._free: list[Bytes] = []
        self._pools = pools

    def allocate(self, nbytes: int) -> Bytes:
        """A buffer of this size, from before if there is one."""
        try:
            while len(buffer := self._free.pop()) != nbytes:
                """Nobody will want it."""
        except IndexError:
            return page_aligned(nbytes)
        return buffer

    def keep(self, buffer: Bytes) -> None:
        """Take a buffer that nobody uses any more."""
        self._free.append(buffer)

    def at_most(self, nbytes: int) -> int:
        """How many bytes are kept; none from here on, if they are more than that."""
        kept = sum(map(len, self._free))
        if kept <= nbytes:
            return kept
        self._free.clear()
        return 0

    def trim(self, most: int, nbytes: int) -> None:
        """Let go of all but so many of this size for each pool: a smaller budget has no more."""
        kept: list[Bytes] = []
        most *= self._pools
        with contextlib.suppress(IndexError):
            while True:
                buffer = self._free.pop()  # nobody else can take it meanwhile
                if len(buffer) == nbytes and len(kept) < most:
                    kept.append(buffer)
        self._free.extend(kept)


class BufferPool:
    """Buffers of one size, aligned to pages, reused until the pool is closed."""

    def __init__(
        self,
        budget: int,
        threads: int,
        block: int,
        largest: int = LARGEST_UNIT,
        staging: Staging | None = None,
        spares: Spares | None = None,
    ) -> None:
        """One buffer for each thread, a whole number of blocks, of `largest` bytes at most.

        A thread's share of the budget is its buffer, as much again for what a device or a cast
        copies on the way, and two pieces that may wait for their other half (`ContentDigests`).
        """
        self.threads = max(1, min(threads, budget // SHARE))
        room = (budget // self.threads - 2 * CONTENT_PIECE) // 2
        room = min(largest, room)
        step = max(block, HUGE_PAGE) if room >= HUGE_PAGE else block
        self.unit = max(block, room // step * step)
        self.staging = staging
        self._spares = spares if staging is None else None
        self._allocate = page_aligned if staging is None else staging.allocate
        if spares is not None and staging is not None:
            spares.at_most(budget // KEPT)
        if self._spares is not None:
            self._spares.trim(self.threads, self.unit)
            self._allocate = self._spares.allocate
        self._free: deque[tuple[Bytes, Callable[[], None] | None]] = deque()
        self._made = 0
        self._ready = threading.Condition()

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """Take one buffer; waits while all are taken."""
        taken = self.take()
        assert taken is not None
        try:
            yield taken
        finally:
            self.give(taken)

    def take(self, *, wait: bool = True) -> Bytes | None:
        """One buffer that nothing copies from or to; None if none is free, without `wait`."""
        with self._ready:
            while not self._free and self._made >= self.threads:
                if not wait:
                    return None
                self._ready.wait()
            if not self._free or (self._made < self.threads and self.staging is not None):
                self._made += 1
                taken = None
            else:
                # Of buffers that a device still reads, the one given back first is done first.
                taken, done = self._free.pop() if self.staging is None else self._free.popleft()
        try:
            if taken is None:
                return self._allocate(self.unit)
            if done is not None:
                done()
        except BaseException:
            with self._ready:
                self._made -= 1  # nobody has it, so that another may be made
                self._ready.notify()
            raise
        return taken

    def give(self, buffer: Bytes) -> None:
        """Give a buffer back, with what was begun with it on this thread."""
        done = None
        try:
            done = None if self.staging is None else self.staging.fence()
        finally:
            with self._ready:
                self._free.append((buffer, done))  # others wait for it, whatever the device says
                self._ready.notify()

    def close(self) -> None:
        """Wait for everything that was begun with buffers given back, and let go of them."""
        with self._ready:
            free = list(self._free)
            self._free.clear()
            self._made -= len(free)
        with contextlib.ExitStack() as waits:  # all of them, also after an error of one
            for buffer, done in free:
                if self.staging is not None:
                    waits.callback(self.staging.release, buffer)
                if self._spares is not None:
                    self._spares.keep(buffer)
                if done is not None:
                    waits.callback(done)
