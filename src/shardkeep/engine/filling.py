# SPDX-License-Identifier: Apache-2.0
"""Filling memory of ours with the elements of chunks, wherever those live.

The caller's memory is read once. What is small goes together: from host memory in one copy, from a
device in one transfer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import (
    SMALL_STAGED,
    Bytes,
    HostSource,
    Source,
    StagedSource,
    Staging,
)
from shardkeep.columns import Ints
from shardkeep.engine.moves import Mover
from shardkeep.memory import Addresses
from shardkeep.planner import NO_IMAGE, Image

__all__ = ["SMALL", "Chunks", "Filler"]

SMALL = 32 << 10
"""Chunks up to this size are copied many at a time: below it, a copy costs less than its call."""
FEW_GAPS = 8
"""Runs of chunks without an address in a unit: with more of them, all are asked for together."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a file or another stretch of bytes, in the order they lie there."""

    start: Ints
    """First byte of each in it; ascending."""
    nbytes: Ints
    """Bytes of each; none is empty."""
    itemsize: Ints
    """Bytes of an element of each."""
    sources: Callable[[int, int], Sequence[Source]]
    """Gives the elements of chunks [low, high), when they are needed, on any thread."""
    image: Image = NO_IMAGE
    """Memory of ours that holds some of it."""
    addresses: Callable[[int, int], Addresses] | None = None
    """Says where chunks [low, high) lie in host memory as they are stored, which stands still
    until all is copied; 0 for one that does not."""


class Filler:
    """Copies chunks to where they lie in a stretch of bytes, part by part; from any thread."""

    def __init__(self, chunks: Chunks, staging: Staging | None = None) -> None:
        """With `staging`, what is on a device is only begun: see `Staging.fence`."""
        self._chunks = chunks
        self._staging = staging
        self._held: tuple[int, Source] | None = None

    def fill(self, low: int, high: int, data: Bytes) -> tuple[int, int]:
        """Copy every chunk's part of [low, high) into `data`; says which chunks have one."""
        first, last = self.rows(low, high)
        if first < last:
            self._fill_chunks(first, last, low, data)
        return first, last

    def rows(self, low: int, high: int) -> tuple[int, int]:
        """The chunks that have a part in [low, high)."""
        chunks = self._chunks
        first = int(chunks.start.searchsorted(low, "right"))
        if first and chunks.start[first - 1] + chunks.nbytes[first - 1] > low:
            first -= 1
        return first, int(chunks.start.searchsorted(high, "left"))

    def _fill_chunks(self, first: int, last: int, low: int, data: Bytes) -> None:
        chunks = self._chunks
        if chunks.addresses is not None and self._staging is None:
            address = chunks.addresses(first, last)
            known = np.flatnonzero(address)
            rows = first + known
            edges = np.concatenate([[first - 1], rows, [last]])
            gaps = np.flatnonzero(np.diff(edges) > 1).tolist()
            if len(gaps) <= FEW_GAPS:
                Mover(chunks.start[rows], chunks.nbytes[rows], address[known]).fill(
                    low, low + len(data), data
                )
                for gap in gaps:
                    self._fill_sources(int(edges[gap]) + 1, int(edges[gap + 1]), low, data)
                return
        self._fill_sources(first, last, low, data)

    def _fill_sources(self, first: int, last: int, low: int, data: Bytes) -> None:
        """The same for chunks whose address is not known."""
        chunks = self._chunks
        if last == first + 1:
            self._fill_part(first, self._source(first), low, data)
            return
        start = (chunks.start[first:last] - low).tolist()
        nbytes = chunks.nbytes[first:last].tolist()
        batch = _Batch(data, self._staging)
        for at, length, source, row in zip(
            start, nbytes, chunks.sources(first, last), range(first, last), strict=True
        ):
            whole = at >= 0 and at + length <= len(data)
            if not (whole and batch.add(source, at, length)):
                self._fill_part(row, source, low, data)
        batch.copy()

    def _source(self, row: int) -> Source:
        """The elements of a chunk; those of a large one are wanted again and again."""
        held = self._held
        if held is None or held[0] != row:
            (source,) = self._chunks.sources(row, row + 1)
            held = self._held = (row, source)
        return held[1]

    def _fill_part(self, row: int, source: Source, low: int, data: Bytes) -> None:
        """Copy what lies in the unit of one chunk."""
        chunks = self._chunks
        at, item = int(chunks.start[row]) - low, int(chunks.itemsize[row])
        begin, end = max(at, 0), min(at + int(chunks.nbytes[row]), len(data))
        staged = self._staging is not None and isinstance(source, StagedSource)
        read = source.begin_read if staged else source.read_into  # type: ignore[attr-defined]
        read((begin - at) // item, (end - at) // item, data[begin:end])


_LITTLE = sys.byteorder == "little"


def _plain_memory(source: Source, nbytes: int) -> object | None:
    """The source's own memory, where it is exactly the bytes to be stored; else None."""
    if type(source) is HostSource:
        array = source.array
        if array.flags.c_contiguous and array.nbytes == nbytes and array.dtype.isnative and _LITTLE:
            return array
    return None


class _Batch:
    """Small chunks that lie end to end, copied all at once: from host memory, or by a device."""

    def __init__(self, data: Bytes, staging: Staging | None) -> None:
        self._data = data
        self._staging = staging
        self._plain: list[object] = []
        self._staged: list[StagedSource] = []
        self._begin = self._end = 0

    def add(self, source: Source, at: int, nbytes: int) -> bool:
        """Take a chunk that goes to this place; False if it must be copied by itself."""
        plain = _plain_memory(source, nbytes) if nbytes <= SMALL else None
        staged = (
            plain is None
            and self._staging is not None
            and nbytes <= SMALL_STAGED
            and isinstance(source, StagedSource)
        )
        if self._end != at or (self._staged if plain is not None else self._plain):
            self.copy()
        if plain is not None:
            self._plain.append(plain)
        elif staged:
            self._staged.append(source)  # type: ignore[arg-type]
        else:
            return False
        if len(self._plain) + len(self._staged) == 1:
            self._begin = at
        self._end = at + nbytes
        return True

    def copy(self) -> None:
        """Copy what was added, or begin to."""
        place = self._data[self._begin : self._end]
        if self._plain:
            np.copyto(place, np.frombuffer(b"".join(self._plain), np.uint8))  # type: ignore[arg-type]
            self._plain.clear()
        if self._staged:
            assert self._staging is not None
            self._staging.begin_gather(self._staged, place)
            self._staged = []
