# SPDX-License-Identifier: Apache-2.0
"""Regions that cannot be read as they lie: cut into pieces that fit a buffer, one after the other.

Elements that lie strided in a file, that have to be worked out, that are cast on the way, or that
go to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from shardkeep.arrays import Sink
from shardkeep.boxes import strides as row_major
from shardkeep.dtypes import DType
from shardkeep.engine.blocks import BlockFile
from shardkeep.engine.parallel import run_in_order
from shardkeep.errors import CorruptionError
from shardkeep.foreign.found import Array, Ints, Made

__all__ = ["Piece", "Strided", "read_pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Strided:
    """A part that lies in a file, element by element."""

    use: Callable[[], AbstractContextManager[BlockFile]]
    """Opens the file."""
    start: int
    """Byte of its first element."""
    strides: Ints
    """Steps in elements."""
    bits: np.dtype[np.generic]
    """An element."""

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """A box of it: all bytes from its first element to its last, and then a view of them."""
        item = self.bits.itemsize
        low = self.start + item * _dot(offsets, self.strides)
        nbytes = item * span(sizes, self.strides)
        data = np.empty(nbytes, np.uint8)
        with self.use() as file:
            if not 0 <= low <= file.payload - nbytes:
                raise CorruptionError(
                    f"{file.name} has {file.payload} bytes; a tensor should lie in bytes {low} to "
                    f"{low + nbytes}"
                )
            file.read_at(data, low)
        steps = tuple(step * item for step in self.strides)
        return np.ndarray(sizes, self.bits.newbyteorder("<"), data, 0, steps)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A region of a part, and where it goes."""

    place: Made | Strided
    """The part."""
    offsets: Ints
    """Where in the part the region begins."""
    sizes: Ints
    """Its extent."""
    sink: Sink
    """Where it goes."""
    dest: Ints
    """Where in the sink it begins."""
    dtype: DType
    """What the elements are."""

    def cut(self, limit: int) -> Iterator[Piece]:
        """Halved along its widest step, until what is read at once is no more than `limit`."""
        strided = isinstance(self.place, Strided)
        steps = self.place.strides if isinstance(self.place, Strided) else row_major(self.sizes)
        count = span(self.sizes, steps) if strided else int(np.prod(self.sizes, dtype=object))
        if count * self.dtype.itemsize <= limit or max(self.sizes, default=1) == 1:
            yield self
            return
        wide = [dim for dim, n in enumerate(self.sizes) if n > 1]
        dim = max(wide, key=lambda d: abs(steps[d]))
        half = self.sizes[dim] // 2
        for low, extent in ((0, half), (half, self.sizes[dim] - half)):
            part = Piece(
                self.place,
                _with(self.offsets, dim, self.offsets[dim] + low),
                _with(self.sizes, dim, extent),
                self.sink,
                _with(self.dest, dim, self.dest[dim] + low),
                self.dtype,
            )
            yield from part.cut(limit)

    def read(self) -> int:
        """Read it and put it where it goes; returns how many bytes that were."""
        block = self.place.read(self.offsets, self.sizes)
        bits = block.view(self.dtype.bits().newbyteorder("<"))
        self.sink.put(self.dest, bits, self.dtype)
        return int(bits.nbytes)


def read_pieces(
    pieces: Sequence[Piece], limit: int, threads: int, progress: Callable[[int], None] | None
) -> None:
    """Read all of them, a few at a time, each no larger than `limit` bytes."""
    small = [part for piece in pieces for part in piece.cut(limit)]

    def read(number: int) -> None:
        nbytes = small[number].read()
        if progress is not None:
            progress(nbytes)

    run_in_order(range(len(small)), read, threads)


def span(sizes: Ints, strides: Ints) -> int:
    """Elements from the first to the last of a box, those between its own counted too."""
    return 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))


def _dot(offsets: Ints, strides: Ints) -> int:
    return sum(o * step for o, step in zip(offsets, strides, strict=True))


def _with(values: Ints, dim: int, value: int) -> Ints:
    return (*values[:dim], value, *values[dim + 1 :])
