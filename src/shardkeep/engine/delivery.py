# SPDX-License-Identifier: Apache-2.0
"""Delivering bytes that were read: each region's part of a buffer, copied to where it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardkeep.arrays import (
    SMALL_STAGED,
    Bytes,
    FlatSink,
    HostPlaces,
    HostSink,
    Sink,
    SmallPart,
    StagedSink,
    Staging,
)
from shardkeep.boxes import flat_range_boxes, strides
from shardkeep.columns import Boxes, Column
from shardkeep.dtypes import DType
from shardkeep.engine.moves import move_all
from shardkeep.engine.regions import Regions, Spans
from shardkeep.memory import Addresses, address_of, bytes_at

__all__ = ["Delivery"]

FEW = 8
"""Regions that are looked at one by one."""


class Delivery:
    """Copies regions into their sinks; from any thread."""

    def __init__(
        self,
        regions: Regions,
        spans: Spans,
        sinks: Callable[[int], Sink],
        *,
        places: HostPlaces | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`sinks(number)` gives the sink of that number; what is in `places` needs none.

        With `staging`, buffers go back to a pool that waits for what was begun with them.
        """
        self._staging = staging
        self._regions = regions
        self._sinks = sinks
        self._low = spans.low
        self._high = spans.high
        self._at = spans.at
        self._flat = spans.flat
        self._bits = [dtype.bits() for dtype in regions.dtype]
        self._to = _addresses(regions, spans, places)

    def memory(self, row: int) -> Bytes | None:
        """All bytes of the sink of a region, where they lie row-major in host memory as stored."""
        return _memory(
            self._sinks(int(self._regions.sink[row])),
            self._regions.dtype[int(self._regions.kind[row])],
        )

    def stretch(self, row: int, begin: int, end: int) -> Bytes | None:
        """Where the bytes [begin, end) of a file go, which lie in a region that is one run; None
        where they cannot go there as they are."""
        low, to = int(self._low[row]), int(self._to[row])
        if to:
            return bytes_at(to + begin - low, end - begin)
        memory = self.memory(row)
        at = int(self._at[row]) - low
        return None if memory is None else memory[at + begin : at + end]

    def put(self, row: int, data: Bytes, base: int, begin: int, end: int) -> None:
        """Copy the bytes [begin, end) of a region; `data` begins at byte `base` of the file."""
        if begin >= end:
            return
        regions, low = self._regions, int(self._low[row])
        if self._flat[row]:
            memory = self.memory(row)
            if memory is not None:
                at = int(self._at[row]) + begin - low
                np.copyto(memory[at : at + end - begin], data[begin - base : end - base])
                return
        sink, kind = self._sinks(int(regions.sink[row])), int(regions.kind[row])
        dtype = regions.dtype[kind]
        part = slice(int(regions.stored.start[row]), int(regions.stored.start[row + 1]))
        shape = tuple(regions.stored.sizes[part].tolist())
        size = tuple(regions.size[part].tolist())
        dest = tuple(regions.dest[part].tolist())
        if begin == low and end == int(self._high[row]):
            steps = tuple(step * dtype.itemsize for step in strides(shape))
            block = np.ndarray(size, self._bits[kind], data, low - base, steps)
            self._begin_put(sink)(dest, block, dtype)
            return
        first = int(regions.start[row])
        a, b = (begin - first) // dtype.itemsize, (end - first) // dtype.itemsize
        elements = data[begin - base : end - base].view(self._bits[kind])
        offsets = tuple(regions.stored.offsets[part].tolist())
        put = self._begin_put(sink)
        _put_part(shape, offsets, size, dest, (a, b), elements, put, dtype)

    def _begin_put(self, sink: Sink) -> Callable[[tuple[int, ...], Column, DType], None]:
        staged = self._staging is not None and isinstance(sink, StagedSink)
        return sink.begin_put if staged else sink.put  # type: ignore[attr-defined]

    def put_many(self, rows: Column, data: Bytes, base: int) -> None:
        """Copy the part that each of these regions has in `data`; many of them, and small."""
        if len(rows) <= FEW:
            rows = self._move_few(rows, data, base)
            if not len(rows):
                return
        stop = base + len(data)
        low, high = self._low[rows], self._high[rows]
        begin, end = np.maximum(low, base), np.minimum(high, stop)
        to = self._to[rows]
        moved = (to != 0) & (begin < end)
        if moved.any():
            nbytes = (end - begin)[moved]
            there = to[moved] + (begin - low)[moved].astype(np.uint64)
            here = (begin - base)[moved].astype(np.uint64) + np.uint64(address_of(data))
            move_all(there.tolist(), here.tolist(), nbytes.tolist())
            rows, low, begin, end = (column[~moved] for column in (rows, low, begin, end))
        quick = self._flat[rows] & (begin < end)
        numbers = self._regions.sink[rows].tolist()
        kinds = self._regions.kind[rows].tolist()
        at = self._at[rows] + (begin - low)
        columns = (
            rows.tolist(),
            quick.tolist(),
            numbers,
            kinds,
            at.tolist(),
            (at + (end - begin)).tolist(),
            (begin - base).tolist(),
            (end - base).tolist(),
        )
        sinks, dtypes, copy = self._sinks, self._regions.dtype, np.copyto
        together: list[SmallPart] = []
        for row, is_quick, number, kind, a, b, c, d in zip(*columns, strict=True):
            if is_quick:
                sink = sinks(number)
                memory = _memory(sink, dtypes[kind])
                if memory is not None:
                    copy(memory[a:b], data[c:d])
                    continue
                small = self._staging is not None and d - c <= SMALL_STAGED
                if small and isinstance(sink, StagedSink):
                    together.append(SmallPart(c, d, sink, a, dtypes[kind], row))
                    continue
            self.put(row, data, base, base + c, base + d)
        if self._staging is not None:
            for run in _near(together):
                for part in self._staging.begin_scatter(data, run):
                    self.put(part.row, data, base, base + part.begin, base + part.end)

    def _move_few(self, rows: Column, data: Bytes, base: int) -> Column:
        """Copy those that go to host memory as they are; gives back the others.

        At the seams of large regions there are two of them: arithmetic on columns would cost more.
        """
        stop, source = base + len(data), address_of(data)
        there: list[int] = []
        here: list[int] = []
        nbytes: list[int] = []
        left = []
        for row in rows.tolist():
            to = int(self._to[row])
            if not to:
                left.append(row)
                continue
            low = int(self._low[row])
            begin, end = max(low, base), min(int(self._high[row]), stop)
            if begin < end:
                there.append(to + begin - low)
                here.append(source + begin - base)
                nbytes.append(end - begin)
        move_all(there, here, nbytes)
        return np.array(left, np.int64)


def _addresses(regions: Regions, spans: Spans, places: HostPlaces | None) -> Addresses:
    """Where each region goes, if that is one run of host memory, as stored; else 0."""
    if places is None or not len(regions):
        return np.zeros(len(regions), np.uint64)
    same = np.array([[one is other for other in regions.dtype] for one in places.dtype], np.bool_)
    address = places.address[regions.sink]
    known = spans.flat & (address != 0) & same[places.kind[regions.sink], regions.kind]
    extent = Boxes(regions.stored.start, regions.dest, regions.shape).volumes() * regions.itemsize
    inside = (spans.at >= 0) & (spans.at + (spans.high - spans.low) <= extent)
    if not inside[known].all():
        raise AssertionError("a region reaches out of its sink")
    to: Addresses = np.where(known, address + spans.at.astype(np.uint64), np.uint64(0))
    return to


def _near(parts: Sequence[SmallPart]) -> Iterator[list[SmallPart]]:
    """Cut at wide gaps, in which something else lies: it would travel too."""
    run: list[SmallPart] = []
    end = 0
    for part in parts:
        if run and part.begin - end > SMALL_STAGED:
            yield run
            run = []
        run.append(part)
        end = max(end, part.end)
    if run:
        yield run


def _memory(sink: Sink, dtype: DType) -> Bytes | None:
    if type(sink) is FlatSink:
        return sink.bytes if sink.dtype is dtype else None
    if type(sink) is not HostSink or sink.dtype is not dtype:
        return None
    array = sink.array
    if not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    return array.reshape(-1).view(np.uint8)


def _put_part(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    size: tuple[int, ...],
    dest: tuple[int, ...],
    span: tuple[int, int],
    elements: Column,
    put: Callable[[tuple[int, ...], Column, DType], None],
    dtype: DType,
) -> None:
    """Copy what the elements [a, b) of a chunk have in common with a region of it."""
    at = 0
    for inner, extent in flat_range_boxes(shape, *span):
        count = math.prod(extent)
        block = elements[at : at + count].reshape(extent)
        at += count
        low = tuple(map(max, offsets, inner))
        ends = zip(offsets, size, inner, extent, strict=True)
        high = tuple(min(o + s, i + e) for o, s, i, e in ends)
        if any(x >= y for x, y in zip(low, high, strict=True)):
            continue
        cut = tuple(slice(x - i, y - i) for x, y, i in zip(low, high, inner, strict=True))
        place = tuple(d + x - o for d, x, o in zip(dest, low, offsets, strict=True))
        put(place, block[cut], dtype)
