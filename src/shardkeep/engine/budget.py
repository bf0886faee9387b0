# SPDX-License-Identifier: Apache-2.0
"""One budget of memory for payload, handed out as equal buffers.

A task takes its one buffer at once and never asks for a second while it holds it, so that tasks
cannot wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from shardkeep.arrays import Allocate, Bytes
from shardkeep.engine.digests import CONTENT_PIECE
from shardkeep.engine.pages import HUGE_PAGE, page_aligned

__all__ = ["MINIMUM_BUDGET", "BufferPool", "default_budget", "io_threads"]

MINIMUM_BUDGET = 8 << 20
MAXIMUM_DEFAULT = 1 << 30
LARGEST_UNIT = 8 << 20
SHARE = 4 << 20
"""The least one thread can work with."""


def io_threads(ranks_on_host: int = 1) -> int:
    """How many threads move bytes: few, and fewer where ranks share the machine."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(4, cores // max(1, ranks_on_host)))


def available_memory() -> int:
    """Bytes that can still be allocated, under the control group's limit where there is one."""
    found = [4 << 30]
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = [int(line.split()[1]) * 1024]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(found))


def default_budget(ranks_on_host: int = 1) -> int:
    """A tenth of what is available, shared by the ranks of this host; 8 MiB to 1 GiB."""
    share = available_memory() // 10 // max(1, ranks_on_host)
    return max(MINIMUM_BUDGET, min(MAXIMUM_DEFAULT, share))


def checked_budget(memory_budget: int | None, ranks_on_host: int = 1) -> int:
    """The caller's budget, or the default; too small a one is a `ValueError`."""
    if memory_budget is None:
        return default_budget(ranks_on_host)
    if memory_budget < MINIMUM_BUDGET:
        raise ValueError(
            f"memory_budget is {memory_budget} bytes; at least {MINIMUM_BUDGET} are needed"
        )
    return memory_budget


class BufferPool:
    """Buffers of one size, aligned to pages, reused until the pool is closed."""

    def __init__(
        self,
        budget: int,
        threads: int,
        block: int,
        largest: int = LARGEST_UNIT,
        allocate: Allocate = page_aligned,
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
        self._allocate = allocate
        self._free: list[Bytes] = []
        self._made = 0
        self._ready = threading.Condition()

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """Take one buffer; waits while all are taken."""
        with self._ready:
            while not self._free and self._made >= self.threads:
                self._ready.wait()
            if self._free:
                taken = self._free.pop()
            else:
                self._made += 1
                taken = self._allocate(self.unit)
        try:
            yield taken
        finally:
            with self._ready:
                self._free.append(taken)
                self._ready.notify()
