# SPDX-License-Identifier: Apache-2.0
"""Columns: millions of boxes and names as a few flat arrays.

One row per tensor or chunk; what differs in length from row to row (coordinates, names) lies flat
with a column of starts. Objects are made only when somebody looks at one row.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.errors import FormatError
from shardkeep.metadata import ChunkStorageMetadata

__all__ = [
    "Boxes",
    "ChunkList",
    "Ints",
    "Strings",
    "narrow",
    "order_by",
    "pack",
    "ragged_rows",
    "slices",
    "starts",
    "unpack",
]

Ints: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]

_EMPTY = np.zeros(0, np.int64)

_SLICE = 1 << 14
"""Rows worked on together: few enough that what is computed on the way stays in the cache."""


def slices(count: int) -> Iterator[tuple[int, int]]:
    """Cut `count` rows into runs (low, high) for work that makes several columns on its way."""
    return ((low, min(low + _SLICE, count)) for low in range(0, count, _SLICE))


def starts(lengths: Column) -> Ints:
    """Where each row begins, given how long each is; one more entry for the end."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def ragged_rows(start: Ints, rows: Column) -> tuple[Ints, Ints]:
    """Flat positions of the given rows, and where each begins among them."""
    lengths = start[rows + 1] - start[rows]
    new_start = starts(lengths)
    flat = np.repeat(start[rows] - new_start[:-1], lengths)
    flat += np.arange(new_start[-1], dtype=np.int64)
    return flat, new_start


def order_by(numbers: Column, limit: int) -> npt.NDArray[np.intp]:
    """The stable order of numbers in [0, limit)."""
    # numpy sorts 16 bits by radix, several times faster than it compares.
    return np.argsort(numbers.astype(np.uint16) if limit <= 1 << 16 else numbers, kind="stable")


def narrow(column: Column) -> Column:
    """The same integers in the fewest bytes, for messages."""
    if len(column) == 0:
        return column.astype(np.int8)
    low, high = int(column.min()), int(column.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return column.astype(kind)
    return column.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Many boxes of any number of dimensions."""

    start: Ints
    """Where each box's coordinates begin; one more than there are boxes."""
    offsets: Ints
    """First index in each dimension, all boxes end to end."""
    sizes: Ints
    """Extents, likewise."""

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.start) - 1

    def __getitem__(self, row: int) -> ChunkStorageMetadata:
        """One box as an object."""
        if row < 0:
            row = range(len(self))[row]
        part = slice(int(self.start[row]), int(self.start[row + 1]))
        return ChunkStorageMetadata(
            tuple(self.offsets[part].tolist()), tuple(self.sizes[part].tolist())
        )

    @property
    def ndim(self) -> Ints:
        """Dimensions of each box."""
        return np.diff(self.start)

    def take(self, rows: Column) -> Boxes:
        """The given boxes, in that order."""
        start = starts(self.start[rows + 1] - self.start[rows])
        out = Boxes(start, np.empty(start[-1], np.int64), np.empty(start[-1], np.int64))
        for low, high in slices(len(rows)):
            flat, _ = ragged_rows(self.start, rows[low:high])
            part = slice(int(start[low]), int(start[high]))
            # Flat positions are in range by construction; "clip" spares a buffer.
            self.offsets.take(flat, out=out.offsets[part], mode="clip")
            self.sizes.take(flat, out=out.sizes[part], mode="clip")
        return out

    def part(self, low: int, high: int) -> Boxes:
        """Boxes [low, high), without copying their coordinates."""
        start = self.start[low : high + 1]
        flat = slice(int(start[0]), int(start[-1]))
        return Boxes(start - start[0], self.offsets[flat], self.sizes[flat])

    def volumes(self) -> Ints:
        """Elements in each box."""
        out = np.ones(len(self), np.int64)
        for low, high in slices(len(self)):
            part, volumes = self.part(low, high), out[low:high]
            for _, rows, at in part.dimensions():
                volumes[rows] *= part.sizes[at]
        return out

    def dimensions(self) -> Iterator[tuple[int, Column | slice, Column | slice]]:
        """For each dimension: its number, the boxes that have it, where their coordinates lie."""
        ndim = self.ndim
        if len(ndim) == 0:
            return
        most = int(ndim.max())
        if most == int(ndim.min()):
            for dim in range(most):
                yield dim, slice(None), slice(dim, None, most)
            return
        for dim in range(most):
            rows = np.flatnonzero(ndim > dim)
            yield dim, rows, self.start[rows] + dim

    def by_ndim(self) -> Iterator[tuple[int, Column | slice, Ints, Ints]]:
        """Groups of equal dimension: (ndim, rows, offsets matrix, sizes matrix)."""
        ndim = self.ndim
        present = np.flatnonzero(np.bincount(ndim))
        if len(present) == 1:
            d = int(present[0])
            shape = (len(self), d)
            yield d, slice(None), self.offsets.reshape(shape), self.sizes.reshape(shape)
            return
        for d in present.tolist():
            rows = np.flatnonzero(ndim == d)
            flat = self.start[rows][:, None] + np.arange(d, dtype=np.int64)
            yield d, rows, self.offsets[flat], self.sizes[flat]

    @classmethod
    def of(cls, boxes: Sequence[ChunkStorageMetadata]) -> Boxes:
        """Columns from objects."""
        lengths = np.fromiter((len(b.offsets) for b in boxes), np.int64, len(boxes))
        start = starts(lengths)
        total = int(start[-1])
        return cls(
            start,
            np.fromiter((x for b in boxes for x in b.offsets), np.int64, total),
            np.fromiter((x for b in boxes for x in b.sizes), np.int64, total),
        )

    @classmethod
    def join(cls, parts: Sequence[Boxes]) -> Boxes:
        """All boxes of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        ndim = np.concatenate([p.ndim for p in parts]) if parts else _EMPTY
        return cls(
            starts(ndim),
            np.concatenate([p.offsets for p in parts]) if parts else _EMPTY,
            np.concatenate([p.sizes for p in parts]) if parts else _EMPTY,
        )


T = TypeVar("T")


class Rows(Sequence[T]):
    """A sequence over columns: objects are made by `row`, one at a time, when somebody looks."""

    @abstractmethod
    def row(self, row: int) -> T:
        """The object of one row, counted from 0."""

    @overload
    def __getitem__(self, row: int) -> T: ...
    @overload
    def __getitem__(self, row: slice) -> list[T]: ...
    def __getitem__(self, row: int | slice) -> T | list[T]:
        """One row as an object, or a list of some."""
        if isinstance(row, slice):
            return [self.row(i) for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return self.row(row % len(self))


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The chunks of one tensor: a sequence of boxes over two matrices."""

    __slots__ = ("offsets", "sizes")

    def __init__(self, offsets: Ints, sizes: Ints) -> None:
        """Both of shape (chunks, dimensions)."""
        self.offsets = offsets
        self.sizes = sizes

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.offsets)

    @overload
    def __getitem__(self, row: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, row: slice) -> ChunkList: ...
    def __getitem__(self, row: int | slice) -> ChunkStorageMetadata | ChunkList:
        """One box as an object, or some as a shorter list."""
        if isinstance(row, slice):
            return ChunkList(self.offsets[row], self.sizes[row])
        return ChunkStorageMetadata(
            tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist())
        )

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same boxes."""
        if isinstance(other, ChunkList):
            if not len(self) and not len(other):
                return True  # of whatever dimension
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(
                self.sizes, other.sizes
            )
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Short however long it is."""
        shown = ", ".join(map(repr, self[:3]))
        return f"[{shown}{', ...' if len(self) > 3 else ''}] ({len(self)} chunks)"


@dataclass(frozen=True, slots=True, eq=False)
class Strings(Rows[str]):
    """Many strings as one UTF-8 blob and the offsets into it."""

    blob: bytes
    """All strings end to end."""
    start: Ints
    """Where each begins; one more for the end."""

    def __len__(self) -> int:
        """Number of strings."""
        return len(self.start) - 1

    def row(self, row: int) -> str:
        """One string."""
        return str(self.blob[int(self.start[row]) : int(self.start[row + 1])], "utf-8")

    def tolist(self) -> list[str]:
        """All of them, decoded once."""
        text = str(self.blob, "utf-8")
        if len(text) == len(self.blob):  # ASCII: byte offsets are character offsets
            bounds = self.start.tolist()
            return [text[a:b] for a, b in pairwise(bounds)]
        return self[:]

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Columns from Python strings."""
        parts = [s.encode() for s in strings]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        return cls(b"".join(parts), starts(lengths))


# --- columns on the wire ------------------------------------------------------------------------

_KIND = re.compile(r"[<>|][biufc]\d+\Z")
_HEAD = msgspec.msgpack.Decoder(dict[str, tuple[str, list[int], int]])


def pack(columns: Mapping[str, Column | bytes]) -> bytes:
    """Named columns as one message: a directory, then each column on an 8-byte boundary."""
    head: dict[str, tuple[str, list[int], int]] = {}
    parts: list[bytes] = []
    at = 0
    for name, column in columns.items():
        if isinstance(column, (bytes, bytearray, memoryview)):
            kind, shape, raw = "bytes", [len(column)], bytes(column)
        else:
            kind, shape, raw = column.dtype.str, list(column.shape), column.tobytes()
        head[name] = (kind, shape, at)
        parts.append(raw)
        pad = -len(raw) % 8
        parts.append(b"\0" * pad)
        at += len(raw) + pad
    front = msgspec.msgpack.encode(head)
    front += b"\xc1" * (-len(front) % 8)
    return b"".join([len(front).to_bytes(8, "little"), front, *parts])


def unpack(message: bytes | memoryview) -> dict[str, Any]:
    """What `pack` made, without copying the arrays."""
    view = memoryview(message)
    try:
        length = int.from_bytes(view[:8], "little")
        head = _HEAD.decode(bytes(view[8 : 8 + length]).rstrip(b"\xc1"))
        out: dict[str, Any] = {}
        for name, (kind, shape, at) in head.items():
            # np.dtype takes far more than what `pack` writes, down to Python expressions.
            if kind != "bytes" and not _KIND.match(kind):
                raise ValueError(f"column {name!r} has the unknown type {kind!r}")
            dtype = np.dtype("u1" if kind == "bytes" else kind)
            count = math.prod(shape)
            begin = 8 + length + at
            end = begin + count * dtype.itemsize
            if at < 0 or min(shape, default=0) < 0 or end > len(view):
                raise ValueError(f"column {name!r} is not whole")
            if kind == "bytes":
                (_,) = shape
                out[name] = bytes(view[begin:end])
            else:
                out[name] = np.frombuffer(view, dtype, count, begin).reshape(shape)
        return out
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise FormatError(f"a message between ranks is damaged: {error}") from error
