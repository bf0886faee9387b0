# SPDX-License-Identifier: Apache-2.0
"""Box arithmetic: the geometry behind dedup, resharding and their checks.

A box is where a chunk sits in its whole tensor, and `ChunkStorageMetadata` is the box.
Everything here is pure: nothing reads, writes or knows about ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardkeep.columns import Boxes, Ints, slices
from shardkeep.metadata import ChunkStorageMetadata

__all__ = [
    "FEW_SLABS",
    "Gap",
    "Outside",
    "Overlap",
    "flat_range_boxes",
    "linear_starts",
    "overlap",
    "strides",
    "tiled",
    "tiling_fault",
    "volume",
    "whole",
]


def volume(sizes: Sequence[int]) -> int:
    """Number of elements; exact at any size."""
    return math.prod(sizes)


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> ChunkStorageMetadata:
    """The box that is the entire tensor; thousands of tensors share a few shapes."""
    return ChunkStorageMetadata((0,) * len(shape), shape)


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    out = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        out[dim] = out[dim + 1] * shape[dim + 1]
    return tuple(out)


def overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> ChunkStorageMetadata | None:
    """The region both boxes cover, or None when they share no element.

    >>> overlap(ChunkStorageMetadata((0, 4), (2, 4)), ChunkStorageMetadata((1, 0), (4, 6)))
    ChunkStorageMetadata(offsets=(1, 4), sizes=(1, 2))
    """
    low = tuple(map(max, a.offsets, b.offsets))
    ends_a = map(sum, zip(a.offsets, a.sizes, strict=True))
    ends_b = map(sum, zip(b.offsets, b.sizes, strict=True))
    sizes = tuple(high - at for high, at in zip(map(min, ends_a, ends_b), low, strict=True))
    return ChunkStorageMetadata(low, sizes) if min(sizes, default=1) > 0 else None


def flat_range_boxes(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the row-major element range [start, stop) into boxes, in order.

    Each box is itself contiguous in row-major order; there are at most `2 * ndim - 1` of them.

    >>> flat_range_boxes((4, 5), 3, 12)
    [((0, 3), (1, 2)), ((1, 0), (1, 5)), ((2, 0), (1, 2))]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    rest = tuple(shape[1:])
    zeros = (0,) * len(rest)
    if first == last:
        inner = flat_range_boxes(rest, start - first * row, stop - first * row)
        return [((first, *o), (1, *s)) for o, s in inner]
    out = []
    if start != first * row:
        head = flat_range_boxes(rest, start - first * row, row)
        out += [((first, *o), (1, *s)) for o, s in head]
        first += 1
    full = stop // row
    if full > first:
        out.append(((first, *zeros), (full - first, *rest)))
    if stop != full * row:
        tail = flat_range_boxes(rest, 0, stop - full * row)
        out += [((full, *o), (1, *s)) for o, s in tail]
    return out


# --- does a set of boxes tile a tensor? one at a time, exactly ---------------------------------


@dataclass(frozen=True, slots=True)
class Outside:
    """A box reaches out of the tensor."""

    row: int
    """Which box."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two boxes share elements."""

    first: int
    """One of them."""
    second: int
    """The other."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Elements no box covers."""

    box: ChunkStorageMetadata
    """The first uncovered region in row-major order."""


FEW_SLABS = 30_000
"""As many as take some tenths of a second."""


def tiling_fault(
    shape: Sequence[int], offsets: Ints, sizes: Ints, most: float = math.inf
) -> Outside | Overlap | Gap | None:
    """Why the boxes (rows of two matrices) do not tile `shape` exactly once; None if they do.

    Exact, and meant for naming a fault: it walks the slabs between box edges, one dimension after
    the other. Of boxes that are cut along many there may be any number of those: after about as
    many as somebody has time for, `most`, None says nothing. Empty boxes cover nothing and disturb
    nothing.
    """
    ends = offsets + sizes
    outside = np.flatnonzero((ends > np.asarray(shape, np.int64)).any(axis=1))
    if len(outside):
        return Outside(int(outside[0]))
    rows = np.flatnonzero((sizes > 0).all(axis=1))
    if math.prod(shape) == 0:
        return None
    with contextlib.suppress(_TooManySlabs):
        return _slab_fault(tuple(shape), offsets, ends, rows, 0, [], [], [most])
    return None


class _TooManySlabs(Exception):
    """More of them than anybody has time for."""


def _slab_fault(
    shape: tuple[int, ...],
    offsets: Ints,
    ends: Ints,
    rows: npt.NDArray[np.intp],
    dim: int,
    low: list[int],
    size: list[int],
    left: list[float],
) -> Overlap | Gap | None:
    if dim == len(shape):
        if len(rows) == 0:
            return Gap(ChunkStorageMetadata(tuple(low), tuple(size)))
        return Overlap(int(rows[0]), int(rows[1])) if len(rows) > 1 else None
    if len(rows) == 0:
        rest = shape[dim:]
        return Gap(ChunkStorageMetadata((*low, *(0,) * len(rest)), (*size, *rest)))
    begin, end = offsets[rows, dim], ends[rows, dim]
    edges = np.unique(np.concatenate([[0, shape[dim]], begin, end])).tolist()
    left[0] -= len(edges) * (1 + len(rows) / 1000)
    if left[0] < 0:
        raise _TooManySlabs
    for a, b in pairwise(edges):
        inside = rows[(begin <= a) & (end >= b)]
        fault = _slab_fault(shape, offsets, ends, inside, dim + 1, [*low, a], [*size, b - a], left)
        if fault is not None:
            return fault
    return None


# --- the same for all tensors at once -----------------------------------------------------------

_PRIME = np.uint64(2**31 - 1)

_Numbers: TypeAlias = npt.NDArray[np.uint64]


def _random_pair(x: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Two independent pseudo-random residues for each number (the splitmix64 finaliser)."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x >> np.uint64(33), x & _PRIME


def _folded(x: _Numbers) -> _Numbers:
    """The same residue modulo the prime 2**31 - 1, at most 4 above it; cheaper than `%`."""
    x = (x & _PRIME) + (x >> np.uint64(31))
    return (x & _PRIME) + (x >> np.uint64(31))


def _measures(boxes: Boxes, seed: int) -> tuple[_Numbers, _Numbers]:
    """Two random product measures of each box, modulo a prime but not reduced."""
    totals = np.ones(len(boxes), np.uint64), np.ones(len(boxes), np.uint64)
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for dim, rows, at in boxes.dimensions():
            salt = np.uint64((seed + dim * 0xD1B54A32D192ED03) % 2**64)
            low = boxes.offsets[at].astype(np.uint64)
            high = low + boxes.sizes[at].astype(np.uint64)
            at_low = _random_pair(low * step + salt)
            at_high = _random_pair(high * step + salt)
            for total, a, b in zip(totals, at_low, at_high, strict=True):
                # Below 2**31 + 4 times 2**32: within 64 bits.
                total[rows] = _folded(total[rows] * (b + _PRIME - a))
    return totals


def tiled(
    shape_start: Ints, shapes: Ints, tensor: npt.NDArray[np.integer], boxes: Boxes, seed: int
) -> npt.NDArray[np.bool_]:
    """For each tensor, whether its boxes cover every element exactly once.

    `tensor` names the tensor of each box and is sorted. Ordinary volumes cannot tell a tiling from
    an overlap that makes up for a gap. Here every dimension gets random weights between its edges,
    so a box has a random volume: the volumes add up to the whole tensor's for every choice of
    weights if and only if the boxes tile it, and by chance otherwise with a probability below
    2**-52 for tensors of up to 32 dimensions. It costs O(boxes x dimensions), irregular or not.
    """
    count = len(shape_start) - 1
    every = Boxes(shape_start, np.zeros(len(shapes), np.int64), shapes)
    result = np.ones(count, np.bool_)
    measures = np.zeros((2, len(boxes)), np.uint64)
    for low, high in slices(len(boxes)):
        part, whose = boxes.part(low, high), tensor[low:high]
        measures[:, low:high] = _measures(part, seed)
        for dim, rows, at in part.dimensions():
            limit = shapes[shape_start[whose[rows]] + dim]
            # A difference of these cannot leave 64 bits; the sum of offset and size could.
            outside = part.offsets[at] > limit - part.sizes[at]
            if outside.any():
                result[whose[rows][outside]] = False
    edges = np.searchsorted(tensor, np.arange(count + 1))
    filled = np.flatnonzero(edges[1:] > edges[:-1])
    for want, measure in zip(_measures(every, seed), measures, strict=True):
        have = np.zeros(count, np.uint64)
        if len(filled):
            have[filled] = np.add.reduceat(measure, edges[filled])
        result &= want % _PRIME == have % _PRIME
    return result


def linear_starts(
    shape_start: Ints, shapes: Ints, tensor: npt.NDArray[np.integer], boxes: Boxes
) -> Ints:
    """Row-major position of each box's first element within its tensor."""
    tensor_strides = np.ones(len(shapes), np.int64)
    for d in np.unique(np.diff(shape_start)).tolist():
        if d < 2:
            continue
        tensors = np.flatnonzero(np.diff(shape_start) == d)
        flat = shape_start[tensors][:, None] + np.arange(d, dtype=np.int64)
        dims = shapes[flat]
        tensor_strides[flat[:, :-1]] = np.cumprod(dims[:, :0:-1], axis=1)[:, ::-1]
    out = np.zeros(len(boxes), np.int64)
    for low, high in slices(len(boxes)):
        part, whose, linear = boxes.part(low, high), tensor[low:high], out[low:high]
        for dim, rows, at in part.dimensions():
            linear[rows] += part.offsets[at] * tensor_strides[shape_start[whose[rows]] + dim]
    return out
