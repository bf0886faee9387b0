# SPDX-License-Identifier: Apache-2.0
"""Regions: parts of stored chunks and where they go, as columns; and the bytes they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardkeep.columns import Boxes, Column, Ints, ragged_rows, starts
from shardkeep.dtypes import DType, lookup
from shardkeep.planner import ReadItems

__all__ = ["Regions", "Spans", "cut_sparse", "regions_of", "spans_of"]

Flags = npt.NDArray[np.bool_]


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
    shape: Ints
    """Extent of the whole sink, likewise."""
    sink: Ints
    """Which sink."""
    dtype: Sequence[DType]
    """The element types that occur."""
    kind: Column
    """Row of `dtype` for each region."""

    def __len__(self) -> int:
        """Number of regions."""
        return len(self.file)

    @property
    def itemsize(self) -> Ints:
        """Bytes of an element of each region."""
        sizes: Ints = np.array([d.itemsize for d in self.dtype], np.int64)[self.kind]
        return sizes

    def matrix(self, flat: Ints, rows: Column | slice, d: int) -> Ints:
        """A flat column of the rows that have `d` dimensions, one line each."""
        begin = self.stored.start[:-1][rows]
        found: Ints = flat[begin[:, None] + np.arange(d, dtype=np.int64)]
        return found


@dataclass(frozen=True, eq=False)
class Spans:
    """The same regions as bytes."""

    low: Ints
    """First byte in the file."""
    high: Ints
    """End in the file."""
    at: Ints
    """Byte of the sink's memory, were it row-major, where the region begins."""
    flat: Flags
    """Whether the region is one run of bytes, both in the file and in such a sink."""
    alone: Flags
    """Whether no other region wants any byte of the span."""


def regions_of(items: ReadItems) -> Regions:
    """The regions of a plan, in its order."""
    chunks = items.chunks
    assert chunks.file is not None
    assert chunks.start is not None
    wanted = items.wanted_boxes
    ndim = chunks.boxes.ndim
    wanted_at = np.repeat(wanted.start[:-1][items.wanted], ndim)
    wanted_at += np.arange(len(items.low)) - np.repeat(starts(ndim)[:-1], ndim)
    return Regions(
        chunks.file,
        chunks.start,
        Boxes(chunks.boxes.start, items.low - chunks.boxes.offsets, chunks.boxes.sizes),
        items.size,
        items.low - wanted.offsets[wanted_at],
        wanted.sizes[wanted_at],
        items.wanted,
        [lookup(kind.dtype) for kind in items.tensors.kinds],
        items.tensors.kind[chunks.tensor],
    )


def cut_sparse(regions: Regions, block: int) -> Regions:
    """Cut regions whose rows lie more than a block apart, so that what is between is not read."""
    outer = np.zeros(len(regions), np.int64)
    itemsize = regions.itemsize
    for d, rows, _, sizes in regions.stored.by_ndim():
        if d < 2:
            continue
        extent = regions.matrix(regions.size, rows, d)
        pitch = itemsize[rows].copy()
        run = pitch.copy()
        cut = np.zeros(len(sizes), np.int64)
        for dim in range(d - 1, -1, -1):
            # Bytes from one index of this dimension to the next, and those wanted at each.
            apart = (pitch - run > block) & (extent[:, dim] > 1)
            cut[apart] = np.maximum(cut[apart], dim + 1)
            run = (extent[:, dim] - 1) * pitch + run
            pitch = pitch * sizes[:, dim]
        outer[rows] = cut
    return _expanded(regions, outer) if outer.any() else regions


def _expanded(regions: Regions, outer: Ints) -> Regions:
    """One region for each index of the first `outer` dimensions of each."""
    counts = np.ones(len(regions), np.int64)
    begin = regions.stored.start[:-1]
    most = int(outer.max())
    for dim in range(most):
        rows = np.flatnonzero(outer > dim)
        counts[rows] *= regions.size[begin[rows] + dim]
    taken = np.repeat(np.arange(len(regions)), counts)
    number = np.arange(len(taken)) - np.repeat(starts(counts)[:-1], counts)
    flat, start = ragged_rows(regions.stored.start, taken)
    offsets, size, dest = regions.stored.offsets[flat], regions.size[flat], regions.dest[flat]
    for dim in range(most - 1, -1, -1):
        rows = np.flatnonzero(outer[taken] > dim)
        at = start[rows] + dim
        number[rows], step = np.divmod(number[rows], size[at])
        offsets[at] += step
        dest[at] += step
        size[at] = 1
    return replace(
        regions,
        file=regions.file[taken],
        start=regions.start[taken],
        stored=Boxes(start, offsets, regions.stored.sizes[flat]),
        size=size,
        dest=dest,
        shape=regions.shape[flat],
        sink=regions.sink[taken],
        kind=regions.kind[taken],
    )


def spans_of(regions: Regions) -> Spans:
    """Where each region begins and ends in its file, and whether it is one run."""
    itemsize = regions.itemsize
    count = len(regions)
    low, high = np.zeros(count, np.int64), np.ones(count, np.int64)
    at, flat = np.zeros(count, np.int64), np.ones(count, np.bool_)
    for d, rows, offsets, sizes in regions.stored.by_ndim():
        if d == 0:
            continue
        extent = regions.matrix(regions.size, rows, d)
        shape = regions.matrix(regions.shape, rows, d)
        step, sink_step = _strides(sizes), _strides(shape)
        low[rows] = (offsets * step).sum(axis=1)
        high[rows] = ((offsets + extent - 1) * step).sum(axis=1) + 1
        at[rows] = (regions.matrix(regions.dest, rows, d) * sink_step).sum(axis=1)
        flat[rows] = _is_run(sizes, extent) & _is_run(shape, extent)
    low, high = regions.start + low * itemsize, regions.start + high * itemsize
    return Spans(low, high, at * itemsize, flat, _alone(regions.file, low, high))


def _strides(shape: Ints) -> Ints:
    """Row-major strides in elements; one shape a line."""
    step = np.ones_like(shape)
    step[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return step


def _is_run(shape: Ints, extent: Ints) -> Flags:
    """Whether a part of this extent is one run of row-major elements, wherever it begins."""
    run = np.ones(len(shape), np.bool_)
    whole = np.ones(len(shape), np.bool_)
    for dim in range(shape.shape[1] - 1, -1, -1):
        run &= whole | (extent[:, dim] == 1)
        whole &= shape[:, dim] == extent[:, dim]
    return run


def _alone(file: Ints, low: Ints, high: Ints) -> Flags:
    order = np.lexsort((low, file))
    # One number line for all files, so that one running maximum serves them.
    stretch = int(high.max(initial=0)) + 1
    if (int(file.max(initial=0)) + 1) * stretch >= 2**63:
        return np.zeros(len(order), np.bool_)
    line = file[order] * stretch
    reach = np.maximum.accumulate(line + high[order])
    free = np.ones(len(order), np.bool_)
    free[1:] &= reach[:-1] <= line[1:] + low[order][1:]
    free[:-1] &= reach[:-1] <= line[1:] + low[order][1:]
    alone = np.empty(len(order), np.bool_)
    alone[order] = free
    return alone
