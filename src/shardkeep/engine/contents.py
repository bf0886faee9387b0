# SPDX-License-Identifier: Apache-2.0
"""Content digests of chunks that are not being written: has anything changed?"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator

import numpy as np

from shardkeep.columns import Column, Ints
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.digests import Algorithm, ContentDigests
from shardkeep.engine.filling import Chunks, Filler
from shardkeep.engine.parallel import run_in_order
from shardkeep.memory import Addresses

__all__ = ["digest_memory", "digest_sources", "view_memory"]

TOGETHER = 256
"""Chunks in memory that one thread takes at a time, at most."""
PART = 16 << 20
"""Bytes in memory that one thread takes at a time, about."""

# A type for each length would be garbage in a cycle, each of which the collector has to find.
_ALL_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B").toreadonly()


def digest_memory(
    address: Addresses,
    nbytes: Ints,
    *,
    algorithm: Algorithm,
    threads: int,
    worked: Callable[[], None] = lambda: None,
) -> Column:
    """The content digest of each chunk, one row for each, digested where it lies in host memory;
    which the caller keeps as it is meanwhile."""
    digests = ContentDigests(algorithm, nbytes)

    def work(task: tuple[int, int, int, int]) -> None:
        first, last, low, high = task
        ends = np.minimum(nbytes[first:last], high).tolist()
        places = (address[first:last] + np.uint64(low)).tolist()
        parts = [view_memory(at, end - low) for at, end in zip(places, ends, strict=True)]
        digests.add_run(first, [low] * len(parts), parts)
        worked()

    run_in_order(list(_tasks(nbytes)), work, threads, alone_here=True)
    return digests.results()


def _tasks(nbytes: Ints) -> Iterator[tuple[int, int, int, int]]:
    """Chunks [first, last), and which bytes [low, high) of them: all, or a part of one."""
    ends = np.cumsum(nbytes)
    row = 0
    while row < len(nbytes):
        length = int(nbytes[row])
        if length > PART:
            for low in range(0, length, PART):
                yield row, row + 1, low, low + PART
            row += 1
            continue
        last = min(int(np.searchsorted(ends, ends[row] - length + PART, "right")), row + TOGETHER)
        yield row, last, 0, PART
        row = last


def view_memory(address: int, nbytes: int) -> memoryview:
    """Host memory by its address, which the caller holds."""
    return _ALL_MEMORY[address : address + nbytes]


def digest_sources(
    chunks: Chunks,
    *,
    algorithm: Algorithm,
    pool: BufferPool,
    threads: int,
    worked: Callable[[], None] = lambda: None,
) -> Column:
    """The content digest of each chunk, one row for each, by way of the pool's buffers. Chunks lie
    end to end, from 0 on."""
    digests = ContentDigests(algorithm, chunks.nbytes)
    filler, staging = Filler(chunks, pool.staging), pool.staging
    total = int(chunks.nbytes.sum())

    def work(low: int) -> None:
        high = min(low + pool.unit, total)
        with pool.buffer() as buffer:
            data = buffer[: high - low]
            try:
                rows = filler.fill(low, high, data)
            finally:
                if staging is not None:
                    staging.fence()()
            digests.add_stretch(chunks.start, rows, low, data.data)
        worked()

    run_in_order(range(0, total, pool.unit), work, min(threads, pool.threads), alone_here=True)
    return digests.results()
