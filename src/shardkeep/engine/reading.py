# SPDX-License-Identifier: Apache-2.0
"""Reading regions: wanted bytes -> digest blocks -> parallel verified reads -> strided copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import Bytes, Sink
from shardkeep.boxes import flat_range_boxes
from shardkeep.columns import Boxes, Column, Ints, starts
from shardkeep.dtypes import DType
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.digests import PAGE_DIGESTS, Algorithm, DigestLayout
from shardkeep.engine.parallel import run_in_order
from shardkeep.errors import CorruptionError, FormatError
from shardkeep.stores.local import ReadFile

__all__ = ["Regions", "VerifiedFile", "read_regions"]


class VerifiedFile:
    """A file whose every byte handed out has been checked, from the root in the record down."""

    def __init__(
        self,
        file: ReadFile,
        name: str,
        layout: DigestLayout,
        root: bytes,
        algorithm: Algorithm,
        check: bool = True,
    ) -> None:
        """Refuse a file whose size is not what the record says."""
        self.file = file
        self.name = name
        self.layout = layout
        self.algorithm = algorithm
        self.check = check
        self._root = root
        self._level2: bytes | None = None
        self._pages: dict[int, bytes] = {}
        self._lock = threading.Lock()
        if file.size != layout.file_size:
            raise CorruptionError(
                f"{name}: the file has {file.size} bytes, the record says {layout.file_size}; "
                "it was cut, grew or was replaced"
            )

    def read_blocks(self, first: int, stop: int, out: Bytes) -> Bytes:
        """Read and check blocks [first, stop); returns the part of `out` that they fill."""
        layout = self.layout
        low, high = first * layout.block, min(stop * layout.block, layout.payload)
        data = out[: high - low]
        self._read(data, low)
        if self.check:
            for number in range(first, stop):
                at = (number - first) * layout.block
                if self.algorithm.digest(data[at : at + layout.block]) != self._expected(number):
                    raise DamagedBlock(self.name, number, layout.block)
        return data

    def _read(self, out: Bytes, offset: int) -> None:
        got = self.file.read_into(out.data, offset)
        if got != len(out):
            raise CorruptionError(
                f"{self.name}: ends at byte {offset + got}, expected {offset + len(out)}"
            )

    def _expected(self, number: int) -> bytes:
        page, inner = divmod(number, PAGE_DIGESTS)
        held = self._pages.get(page)
        if held is None:
            held = self._load_page(page)
        size = self.layout.size
        return held[inner * size : (inner + 1) * size]

    def _load_page(self, page: int) -> bytes:
        with self._lock:
            size = self.layout.size
            if self._level2 is None:
                tail = np.empty(self.layout.file_size - self.layout.tail_start, np.uint8)
                self._read(tail, self.layout.tail_start)
                if self.algorithm.digest(tail) != self._root:
                    raise CorruptionError(
                        f"{self.name}: the digests at its end do not match the record"
                    )
                self._level2 = tail.tobytes()
            if page not in self._pages:
                offset, length = self.layout.page_range(page)
                data = np.empty(length, np.uint8)
                self._read(data, offset)
                if self.algorithm.digest(data) != self._level2[page * size : (page + 1) * size]:
                    raise CorruptionError(f"{self.name}: page {page} of its digests is damaged")
                self._pages[page] = data.tobytes()
            return self._pages[page]

    def check_digests(self) -> None:
        """Check every page of digests, also of blocks nobody read."""
        for page in range(max(self.layout.pages, 1)):
            self._load_page(page) if self.layout.pages else self._check_empty()

    def _check_empty(self) -> None:
        with self._lock:
            tail = np.empty(self.layout.file_size - self.layout.tail_start, np.uint8)
            self._read(tail, self.layout.tail_start)
            if self.algorithm.digest(tail) != self._root:
                raise CorruptionError(f"{self.name}: its end does not match the record")

    def read_range(self, offset: int, nbytes: int) -> bytes:
        """Some bytes, read as the blocks they lie in, and checked."""
        if nbytes == 0:
            return b""
        if not 0 <= offset <= self.layout.payload - nbytes:
            raise FormatError(f"{self.name}: has no bytes {offset} to {offset + nbytes}")
        block = self.layout.block
        first, stop = offset // block, -(-(offset + nbytes) // block)
        out = np.empty((stop - first) * block, np.uint8)
        data = self.read_blocks(first, stop, out)
        inner = offset - first * block
        return data[inner : inner + nbytes].tobytes()

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


class DamagedBlock(CorruptionError):
    """A block differs from its digest; becomes a `CorruptionError` that also names what it hit."""

    def __init__(self, file: str, number: int, block: int) -> None:
        """Remember where, for whoever knows what lies there."""
        low = number * block
        super().__init__(
            f"{file}: block {number} (bytes {low} to {low + block}) differs from its digest"
        )
        self.block_range = (low, low + block)

    def touches(self, low: int, high: int) -> bool:
        """Whether bytes [low, high) of the file lie in the block."""
        return low < self.block_range[1] and high > self.block_range[0]


@dataclass(frozen=True, eq=False)
class Regions:
    """What to read: a part of a stored chunk, and where in a sink it goes. One row each."""

    file: Ints
    """Which file."""
    start: Ints
    """First byte of the stored chunk."""
    stored: Boxes
    """Sizes of the stored chunk; `offsets` is where the region begins in it."""
    size: Ints
    """Extent of the region, all rows end to end."""
    dest: Ints
    """Where in the sink the region begins, likewise."""
    sink: Ints
    """Which sink."""
    dtype: Sequence[DType]
    """The element types that occur."""
    kind: Column
    """Row of `dtype` for each region."""

    def __len__(self) -> int:
        """Number of regions."""
        return len(self.file)


def read_regions(
    files: Callable[[int], AbstractContextManager[VerifiedFile]],
    regions: Regions,
    sinks: Callable[[int], Sink],
    *,
    block: int,
    pool: BufferPool,
    progress: Callable[[int], None] | None = None,
    names: Callable[[int], str] = str,
) -> int:
    """Read every region into its sink; returns the bytes read from files.

    A damaged block raises `CorruptionError` naming the regions that lie in it, through `names`.
    """
    if len(regions) == 0:
        return 0
    regions = _cut_sparse(regions, block)
    itemsize = np.array([d.itemsize for d in regions.dtype], np.int64)[regions.kind]
    low, high = _byte_spans(regions, itemsize)
    units, edges, members = _units(regions.file, low, high, block, pool.unit)
    total = 0
    lock = threading.Lock()

    def read_unit(number: int) -> None:
        nonlocal total
        which, first, stop = units[number]
        mine = members[edges[number] : edges[number + 1]].tolist()
        with pool.buffer() as buffer, files(which) as file:
            try:
                data = file.read_blocks(first, stop, buffer)
            except DamagedBlock as damage:
                hit = [row for row in mine if damage.touches(int(low[row]), int(high[row]))]
                raise _named(damage, {names(int(regions.sink[row])) for row in hit}) from None
            base = first * block
            for row in mine:
                _deliver(regions, row, base, data, int(low[row]), int(high[row]), sinks)
        with lock:
            total += len(data)
        if progress is not None:
            progress(len(data))

    run_in_order(range(len(units)), read_unit, pool.threads)
    return total


def _named(damage: DamagedBlock, names: set[str]) -> CorruptionError:
    hit = sorted(names)
    return CorruptionError(
        f"{damage}; it holds {', '.join(hit[:8])}{' ...' if len(hit) > 8 else ''}. The contents of "
        "the targets are undefined now; load another checkpoint.",
        names=hit,
    )


def _cut_sparse(regions: Regions, block: int) -> Regions:
    """Cut regions whose rows lie more than a block apart, so that what is between is not read."""
    sparse: dict[int, int] = {}
    itemsize = np.array([d.itemsize for d in regions.dtype], np.int64)[regions.kind]
    for d, rows, _, sizes in regions.stored.by_ndim():
        if d < 2:
            continue
        extent = _matrix(regions.size, regions.stored, rows, d)
        pitch = np.ones(len(sizes), np.int64) * itemsize[rows]
        run = pitch.copy()
        outer = np.zeros(len(sizes), np.int64)
        for dim in range(d - 1, -1, -1):
            # Bytes from one index of this dimension to the next, and those wanted at each.
            apart = (pitch - run > block) & (extent[:, dim] > 1)
            outer[apart] = np.maximum(outer[apart], dim + 1)
            run = (extent[:, dim] - 1) * pitch + run
            pitch = pitch * sizes[:, dim]
        numbers = np.arange(len(regions))[rows]
        for at in np.flatnonzero(outer).tolist():
            sparse[int(numbers[at])] = int(outer[at])
    if not sparse:
        return regions
    return _expand(regions, sparse)


def _matrix(flat: Ints, boxes: Boxes, rows: Column | slice, d: int) -> Ints:
    begin = boxes.start[:-1][rows]
    matrix: Ints = flat[begin[:, None] + np.arange(d, dtype=np.int64)]
    return matrix


def _expand(regions: Regions, sparse: Mapping[int, int]) -> Regions:
    """One region for each index of the outer dimensions of the sparse ones."""
    rows: list[int] = []
    shifts: list[tuple[int, ...]] = []
    for row in range(len(regions)):
        outer = sparse.get(row, 0)
        begin = int(regions.stored.start[row])
        extent = regions.size[begin : begin + outer].tolist()
        for index in np.ndindex(*extent):
            rows.append(row)
            shifts.append(index)
    taken = np.array(rows)
    stored = regions.stored.take(taken)
    flat_rows = np.repeat(regions.stored.start[taken], stored.ndim)
    flat_rows += np.arange(len(flat_rows)) - np.repeat(stored.start[:-1], stored.ndim)
    size, dest, offsets = regions.size[flat_rows], regions.dest[flat_rows], stored.offsets.copy()
    for begin, shift in zip(stored.start[:-1].tolist(), shifts, strict=True):
        for dim, step in enumerate(shift):
            offsets[begin + dim] += step
            dest[begin + dim] += step
            size[begin + dim] = 1
    return Regions(
        regions.file[taken],
        regions.start[taken],
        Boxes(stored.start, offsets, stored.sizes),
        size,
        dest,
        regions.sink[taken],
        regions.dtype,
        regions.kind[taken],
    )


def _byte_spans(regions: Regions, itemsize: Ints) -> tuple[Ints, Ints]:
    """First byte and end, in its file, of each region."""
    low = np.zeros(len(regions), np.int64)
    high = np.ones(len(regions), np.int64)
    for d, rows, offsets, sizes in regions.stored.by_ndim():
        if d == 0:
            continue
        extent = _matrix(regions.size, regions.stored, rows, d)
        step = np.ones_like(sizes)
        step[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
        low[rows] = (offsets * step).sum(axis=1)
        high[rows] = ((offsets + extent - 1) * step).sum(axis=1) + 1
    return regions.start + low * itemsize, regions.start + high * itemsize


def _units(
    file: Ints, low: Ints, high: Ints, block: int, unit: int
) -> tuple[list[tuple[int, int, int]], Ints, Ints]:
    """Reads of at most `unit` bytes that cover all spans, and which spans touch each.

    Spans are rounded out to blocks and joined where those touch; no other block is read.
    """
    first, stop = low // block, -(-high // block)
    order = np.lexsort((first, file))
    file, first, stop = file[order], first[order], stop[order]
    # A number line with one stretch per file, so that one running maximum serves all files.
    stretch = int(stop.max()) + 1
    at, end = file * stretch + first, file * stretch + stop
    reach = np.maximum.accumulate(end)
    begins = np.concatenate([[0], np.flatnonzero(at[1:] > reach[:-1]) + 1])
    run_low = at[begins]
    run_high = reach[np.concatenate([begins[1:], [len(at)]]) - 1]
    per_unit = unit // block
    counts = -(-(run_high - run_low) // per_unit)
    number = np.arange(int(counts.sum())) - np.repeat(starts(counts)[:-1], counts)
    unit_low = np.repeat(run_low, counts) + number * per_unit
    unit_high = np.minimum(unit_low + per_unit, np.repeat(run_high, counts))
    unit_file = unit_low // stretch
    units = list(
        zip(
            unit_file.tolist(),
            (unit_low - unit_file * stretch).tolist(),
            (unit_high - unit_file * stretch).tolist(),
            strict=True,
        )
    )
    from_unit = np.searchsorted(unit_low, at, "right") - 1
    to_unit = np.searchsorted(unit_low, end - 1, "right") - 1
    span_counts = to_unit - from_unit + 1
    spans = np.repeat(order, span_counts)
    inside = np.arange(len(spans)) - np.repeat(starts(span_counts)[:-1], span_counts)
    touched = np.repeat(from_unit, span_counts) + inside
    by_unit = np.argsort(touched, kind="stable")
    edges = np.searchsorted(touched[by_unit], np.arange(len(units) + 1))
    return units, edges, spans[by_unit]


def _deliver(
    regions: Regions,
    row: int,
    base: int,
    data: Bytes,
    low: int,
    high: int,
    sinks: Callable[[int], Sink],
) -> None:
    """Copy the part of a region that lies in `data`, which begins at byte `base` of the file."""
    part = slice(int(regions.stored.start[row]), int(regions.stored.start[row + 1]))
    shape = regions.stored.sizes[part].tolist()
    offsets = regions.stored.offsets[part].tolist()
    size = regions.size[part].tolist()
    dest = regions.dest[part].tolist()
    dtype = regions.dtype[int(regions.kind[row])]
    item = dtype.itemsize
    begin, end = max(low, base), min(high, base + len(data))
    if begin >= end:
        return
    sink = sinks(int(regions.sink[row]))
    elements = data[begin - base : end - base].view(dtype.bits())
    chunk = int(regions.start[row])
    a, b = (begin - chunk) // item, (end - chunk) // item
    if _is_contiguous(shape, size):
        # Row-major order within the chunk is row-major order within the region.
        origin = (low - chunk) // item
        at = 0
        for inner, extent in flat_range_boxes(size, a - origin, b - origin):
            count = int(np.prod(extent, dtype=np.int64))
            place = tuple(x + y for x, y in zip(dest, inner, strict=True))
            sink.put(place, elements[at : at + count].reshape(extent), dtype)
            at += count
        return
    _deliver_strided(shape, offsets, size, dest, (a, b), elements, sink, dtype)


def _deliver_strided(
    shape: list[int],
    offsets: list[int],
    size: list[int],
    dest: list[int],
    span: tuple[int, int],
    elements: Column,
    sink: Sink,
    dtype: DType,
) -> None:
    at = 0
    for inner, extent in flat_range_boxes(shape, *span):
        count = int(np.prod(extent, dtype=np.int64))
        block = elements[at : at + count].reshape(extent)
        at += count
        low = [max(o, i) for o, i in zip(offsets, inner, strict=True)]
        high = [min(o + s, i + e) for o, s, i, e in zip(offsets, size, inner, extent, strict=True)]
        if any(x >= y for x, y in zip(low, high, strict=True)):
            continue
        cut = tuple(slice(x - i, y - i) for x, y, i in zip(low, high, inner, strict=True))
        place = tuple(d + x - o for d, x, o in zip(dest, low, offsets, strict=True))
        sink.put(place, block[cut], dtype)


def _is_contiguous(shape: list[int], size: list[int]) -> bool:
    """Whether a region of this extent is one run of its chunk's bytes, wherever it begins."""
    full = True
    for whole, part in zip(reversed(shape), reversed(size), strict=True):
        if not full and part != 1:
            return False
        full = full and whole == part
    return True
