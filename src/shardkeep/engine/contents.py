# SPDX-License-Identifier: Apache-2.0
"""Content digests of chunks that are not being written: has anything changed?"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import Source
from shardkeep.columns import Column, Ints
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.digests import Algorithm, ContentDigests
from shardkeep.engine.parallel import run_in_order
from shardkeep.memory import Addresses

__all__ = ["Contents", "digest_contents"]

TOGETHER = 256
"""Chunks that one thread takes at a time, at most."""
PART = 4 << 20
"""Bytes that one thread takes at a time, about."""


@dataclass(frozen=True, eq=False)
class Contents:
    """Chunks, and how their elements are found while the state stands still."""

    nbytes: Ints
    """Of each."""
    itemsize: Ints
    """Bytes of an element of each."""
    address: Addresses
    """Where each lies in host memory as it is stored; 0 where it does not."""
    sources: Callable[[int, int], Sequence[Source]]
    """Gives the elements of chunks [low, high), on any thread."""


def digest_contents(
    chunks: Contents,
    *,
    algorithm: Algorithm,
    pool: BufferPool,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Column:
    """The content digest of each chunk, one row for each.

    Memory of the host is digested where it is; the rest comes by way of the pool's buffers.
    """
    digests = ContentDigests(algorithm, chunks.nbytes)

    def work(task: tuple[int, int, int, int]) -> None:
        first, last, low, high = task
        if chunks.address[first]:
            ends = np.minimum(chunks.nbytes[first:last], high).tolist()
            places = (chunks.address[first:last] + np.uint64(low)).tolist()
            parts = [_memory(at, end - low) for at, end in zip(places, ends, strict=True)]
            digests.add_run(first, [low] * len(parts), parts)
        else:
            for row, source in zip(range(first, last), chunks.sources(first, last), strict=True):
                end = min(high, int(chunks.nbytes[row]))
                _digest_part(digests, row, source, int(chunks.itemsize[row]), low, end, pool)
        progress(0)

    run_in_order(_tasks(chunks), work, min(threads, pool.threads))
    return digests.results()


def _tasks(chunks: Contents) -> Iterator[tuple[int, int, int, int]]:
    """Chunks [first, last), all in memory or none, and which bytes [low, high) of them: all, or a
    part of one."""
    nbytes = chunks.nbytes
    ends = np.cumsum(nbytes)
    known = chunks.address != 0
    turns = np.flatnonzero(known[1:] != known[:-1]) + 1
    row = 0
    while row < len(nbytes):
        length = int(nbytes[row])
        if length > PART:
            for low in range(0, length, PART):
                yield row, row + 1, low, low + PART
            row += 1
            continue
        last = min(int(np.searchsorted(ends, ends[row] - length + PART, "right")), row + TOGETHER)
        turn = int(np.searchsorted(turns, row, "right"))
        if turn < len(turns):
            last = min(last, int(turns[turn]))
        yield row, last, 0, PART
        row = last


def _memory(address: int, nbytes: int) -> memoryview:
    """Host memory that somebody holds."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _digest_part(
    digests: ContentDigests,
    row: int,
    source: Source,
    itemsize: int,
    low: int,
    high: int,
    pool: BufferPool,
) -> None:
    with pool.buffer() as buffer:
        for begin in range(low, high, len(buffer)):
            end = min(begin + len(buffer), high)
            out = buffer[: end - begin]
            source.read_into(begin // itemsize, end // itemsize, out)
            digests.add_run(row, [begin], [out.data])
