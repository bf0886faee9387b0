# SPDX-License-Identifier: Apache-2.0
"""What tells one checkpoint of another system from the next one at its place.

Every rank parses by itself. Where a checkpoint is replaced in between, two ranks would load two
saves; so the first tells the others what it has found, in a few bytes.

Hosts may have a copy each, which other times and numbers were given to: what a copy has in common
with what it was made from is compared, names and places and sizes and a few pages of the files.
Where it is the very same file that two ranks look at, its time must be the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import msgspec
import numpy as np

from shardkeep import values
from shardkeep.engine.digests import algorithm
from shardkeep.errors import CheckpointError
from shardkeep.foreign.tables import Tables
from shardkeep.foreign.unchanged import Marks
from shardkeep.hosts import host_name

__all__ = ["Fingerprint", "fingerprint"]

PAGE = 4096
"""Bytes that are looked at in one place of a file: its beginning, its middle, its end."""
FILES = 16
"""Files that are looked into, at most: what is read says that files differ, not where."""


@dataclass(frozen=True)
class Fingerprint:
    """What a rank has found."""

    contents: bytes
    """Names, types, shapes, places, plain values, sizes of files, and pages of some."""
    files: bytes
    """Which files these are, on which machine: another has other numbers for them, or reuses
    these."""
    times: bytes
    """When each was last written to."""

    def agrees(self, other: Fingerprint) -> bool:
        """Whether another rank has found the same, or a copy of it."""
        same_files = self.files == other.files
        return self.contents == other.contents and (not same_files or self.times == other.times)

    def encode(self) -> bytes:
        """As a few bytes."""
        return msgspec.msgpack.encode(astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> Fingerprint:
        """What `encode` gave."""
        return cls(*msgspec.msgpack.decode(data, type=tuple[bytes, bytes, bytes]))


def fingerprint(
    tables: Tables, marks: Marks, read: Callable[[int, int, int], bytes]
) -> Fingerprint:
    """Of what was found; `read(file, at, count)` gives bytes of a file."""
    digest = algorithm("xxh3-128").stream()
    tensors, chunks = (
        tables.state.tensors,
        tables.state.chunks_among(np.arange(len(tables.state.tensors)))[0],
    )
    told = [
        list(tensors.names),
        [(kind.dtype, kind.requires_grad) for kind in tensors.kinds],
        {name: _encoded(value, name) for name, value in tables.plain.items()},
        tables.files,
        marks.sizes,
    ]
    digest.update(msgspec.msgpack.encode(told))
    columns = (tensors.kind, tensors.shape_start, tensors.shapes, tensors.alias_of, chunks.tensor)
    boxes = (chunks.boxes.start, chunks.boxes.offsets, chunks.boxes.sizes)
    for column in (*columns, *boxes, chunks.file, chunks.start):
        assert column is not None
        digest.update(np.ascontiguousarray(column, np.int64))
    for number, at in _looked_at(marks.sizes):
        digest.update(read(number, at, PAGE))
    contents: bytes = digest.digest()
    return Fingerprint(contents, _digest([host_name(), marks.numbers]), _digest(marks.times))


def _encoded(value: object, name: str) -> bytes:
    try:
        return values.encode(value, where=name)
    except CheckpointError:
        return b""  # whoever wants it is told then


def _looked_at(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Files, and where in each."""
    some = np.linspace(0, len(sizes) - 1, min(FILES, len(sizes))).round().astype(int)
    for number in np.unique(some).tolist():
        last = max(0, sizes[number] - PAGE)
        for at in sorted({0, last // 2, last}):
            yield number, at


def _digest(told: object) -> bytes:
    found: bytes = algorithm("xxh3-128").digest(msgspec.msgpack.encode(told))
    return found
