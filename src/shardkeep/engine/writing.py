# SPDX-License-Identifier: Apache-2.0
"""Writing one file: spans of bytes from anywhere, digested and written from private buffers.

The caller's memory is read once, into a buffer of ours; what is digested is what is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import Bytes, Source
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.digests import Algorithm, ContentDigests
from shardkeep.engine.parallel import run_in_order
from shardkeep.stores.local import WriteFile

__all__ = ["ChunkSpan", "LateSpan", "write_payload"]


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk's place in the file."""

    start: int
    """First byte in the file."""
    nbytes: int
    """How many."""
    itemsize: int
    """Bytes of an element."""
    source: Callable[[], Source]
    """Gives its elements, when they are needed."""
    chunk: int
    """Its number among the content digests."""


@dataclass(frozen=True, slots=True)
class LateSpan:
    """Bytes known when they are reached: the header at once, the content digests at the end."""

    start: int
    """First byte in the file."""
    nbytes: int
    """How many."""
    data: Callable[[], bytes]
    """Gives them, once everything before them in the file has been read."""


Span = ChunkSpan | LateSpan


def write_payload(
    file: WriteFile,
    spans: Sequence[Span],
    *,
    late: int,
    payload: int,
    block: int,
    pool: BufferPool,
    algorithm: Algorithm,
    content: ContentDigests,
    progress: Callable[[int], None] | None = None,
) -> bytes:
    """Write the spans, which cover [0, payload) in order; returns the level 1 digests.

    Bytes from `late` on may depend on the content digests of all chunks, so they are written after
    everything else.
    """
    starts = [span.start for span in spans]
    level1 = bytearray(-(-payload // block) * algorithm.size)
    turning = late // block * block

    def write_unit(unit: tuple[int, int]) -> None:
        low, high = unit
        with pool.buffer() as buffer:
            data = buffer[: high - low]
            for span in spans[
                max(0, bisect_right(starts, low) - 1) : bisect_right(starts, high - 1)
            ]:
                _fill(span, low, high, data, content)
            for at in range(0, len(data), block):
                number = (low + at) // block
                digest = algorithm.digest(data[at : at + block])
                level1[number * algorithm.size : (number + 1) * algorithm.size] = digest
            file.write_at(data.data, low)
        if progress is not None:
            progress(high - low)

    run_in_order(_units(0, turning, pool.unit), write_unit, pool.threads)
    run_in_order(_units(turning, payload, pool.unit), write_unit, 1)
    return bytes(level1)


def _units(low: int, high: int, unit: int) -> Iterator[tuple[int, int]]:
    for at in range(low, high, unit):
        yield at, min(at + unit, high)


def _fill(span: Span, low: int, high: int, data: Bytes, content: ContentDigests) -> None:
    """Copy the part of a span that lies in [low, high) to its place in `data`."""
    begin, end = max(span.start, low), min(span.start + span.nbytes, high)
    if begin >= end:
        return
    place = data[begin - low : end - low]
    inner = begin - span.start
    if isinstance(span, LateSpan):
        place[:] = np.frombuffer(span.data(), np.uint8)[inner : inner + len(place)]
        return
    source = span.source()
    source.read_into(inner // span.itemsize, (inner + len(place)) // span.itemsize, place)
    content.add(span.chunk, inner, place)
