# SPDX-License-Identifier: Apache-2.0
"""Content digests of chunks that are not being written: has anything changed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardkeep.arrays import Bytes, HostSource, Source
from shardkeep.columns import Column, Ints
from shardkeep.engine.arriving import ArrivingSource
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.digests import Algorithm, ContentDigests
from shardkeep.engine.filling import plain_memory
from shardkeep.engine.parallel import run_in_order

__all__ = ["digest_contents"]

TOGETHER = 256
"""Chunks that one thread takes at a time, at most."""
PART = 4 << 20
"""Bytes that one thread takes at a time, about."""


def digest_contents(
    nbytes: Ints,
    itemsize: Ints,
    sources: Callable[[int, int], Sequence[Source]],
    *,
    algorithm: Algorithm,
    pool: BufferPool,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Column:
    """The content digest of each chunk, one row for each.

    Memory of the host is digested where it is; the rest comes by way of the pool's buffers.
    """
    digests = ContentDigests(algorithm, nbytes)

    def work(task: tuple[int, int, int, int]) -> None:
        first, last, low, high = task
        for row, source in zip(range(first, last), sources(first, last), strict=True):
            end = min(high, int(nbytes[row]))
            _digest_part(digests, row, source, int(itemsize[row]), low, end, pool)
        progress(0)

    run_in_order(_tasks(nbytes), work, min(threads, pool.threads))
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
        most = ends[row] - length + PART
        last = min(int(np.searchsorted(ends, most, "right")), row + TOGETHER)
        yield row, last, 0, PART
        row = last


def _digest_part(
    digests: ContentDigests,
    row: int,
    source: Source,
    itemsize: int,
    low: int,
    high: int,
    pool: BufferPool,
) -> None:
    memory = _memory(source, low, high)
    if memory is not None:
        digests.add_run(row, [low], [memory.data])
        return
    with pool.buffer() as buffer:
        for begin in range(low, high, len(buffer)):
            end = min(begin + len(buffer), high)
            out = buffer[: end - begin]
            source.read_into(begin // itemsize, end // itemsize, out)
            digests.add_run(row, [begin], [out.data])


def _memory(source: Source, low: int, high: int) -> Bytes | None:
    """The bytes [low, high) of a chunk as they are stored, where they lie like that."""
    if isinstance(source, ArrivingSource):
        source.arriving.wait(source.start + low, source.start + high)
        source = HostSource(source.array)
    array = plain_memory(source)
    return None if array is None else array.reshape(-1).view(np.uint8)[low:high]
