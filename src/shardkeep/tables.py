# SPDX-License-Identifier: Apache-2.0
"""The tables under the metadata: tensors, chunks and values as columns.

`StateColumns` and `LocationColumns` make them look like the mappings `Metadata` promises. A
checkpoint of millions of chunks costs a few arrays; one that is opened lazily costs its tensor
table, and the chunk rows of a tensor only once that tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardkeep.columns import Boxes, ChunkList, Column, Ints, starts
from shardkeep.dtypes import DType, lookup
from shardkeep.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    StorageLocation,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["ChunkTable", "LocationColumns", "StateColumns", "TensorTable", "ValueTable"]

NO_ALIAS = -1


@dataclass(frozen=True, eq=False)
class TensorTable:
    """One row per tensor."""

    names: Sequence[str]
    """Fully qualified names."""
    kinds: tuple[TensorProperties, ...]
    """The distinct properties that occur; few."""
    kind: Column
    """Row of `kinds` for each tensor."""
    shape_start: Ints
    """Where each shape begins in `shapes`."""
    shapes: Ints
    """All shapes end to end."""
    alias_of: Ints
    """Row of the tensor that holds the bytes, or -1 where it is this one."""

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.kind)

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        """Name to row."""
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes of one element of each tensor."""
        sizes = np.array([lookup(kind.dtype).itemsize for kind in self.kinds], np.int64)
        return sizes[self.kind] if len(self.kinds) else np.zeros(0, np.int64)

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each tensor."""
        zeros = np.zeros(len(self.shapes), np.int64)
        return Boxes(self.shape_start, zeros, self.shapes).volumes()

    def shape(self, row: int) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(
            self.shapes[int(self.shape_start[row]) : int(self.shape_start[row + 1])].tolist()
        )

    def properties(self, row: int) -> TensorProperties:
        """Properties of one tensor."""
        return self.kinds[int(self.kind[row])]

    def dtype(self, row: int) -> DType:
        """Element type of one tensor."""
        return lookup(self.properties(row).dtype)

    def stored_row(self, row: int) -> int:
        """The tensor whose chunks hold this one's bytes."""
        alias = int(self.alias_of[row])
        return row if alias == NO_ALIAS else alias

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        properties: Sequence[TensorProperties],
        shapes: Sequence[tuple[int, ...]],
        alias_of: Sequence[int] | None = None,
    ) -> TensorTable:
        """Columns from Python lists."""
        kinds: dict[TensorProperties, int] = {}
        kind = np.array([kinds.setdefault(p, len(kinds)) for p in properties], np.uint16)
        shape_start = starts(np.fromiter(map(len, shapes), np.int64, len(shapes)))
        flat = np.fromiter((n for s in shapes for n in s), np.int64, int(shape_start[-1]))
        alias = np.full(len(names), NO_ALIAS) if alias_of is None else np.array(alias_of)
        return cls(names, tuple(kinds), kind, shape_start, flat, alias.astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """One row per stored chunk."""

    tensor: Ints
    """Row of the tensor it belongs to."""
    boxes: Boxes
    """Where it sits in that tensor."""
    rank: Ints
    """Rank that stores it."""
    source: Ints
    """Which of that rank's pieces it comes from."""
    file: Ints | None = None
    """Which file it lies in, once that is decided."""
    start: Ints | None = None
    """First byte in that file, once that is decided."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.tensor)

    def take(self, rows: Column) -> ChunkTable:
        """The given rows, in that order."""
        return ChunkTable(
            self.tensor[rows],
            self.boxes.take(rows),
            self.rank[rows],
            self.source[rows],
            None if self.file is None else self.file[rows],
            None if self.start is None else self.start[rows],
        )

    def part(self, low: int, high: int) -> ChunkTable:
        """Rows [low, high), without copying them."""
        return ChunkTable(
            self.tensor[low:high],
            self.boxes.part(low, high),
            self.rank[low:high],
            self.source[low:high],
            None if self.file is None else self.file[low:high],
            None if self.start is None else self.start[low:high],
        )

    @classmethod
    def join(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """All rows of all tables, in order; either all are placed or none is."""
        none = np.zeros(0, np.int64)
        if not tables:
            return cls(none, Boxes(np.zeros(1, np.int64), none, none), none, none, none, none)
        files = [t.file for t in tables if t.file is not None]
        starts_ = [t.start for t in tables if t.start is not None]
        return cls(
            np.concatenate([t.tensor for t in tables]),
            Boxes.join([t.boxes for t in tables]),
            np.concatenate([t.rank for t in tables]),
            np.concatenate([t.source for t in tables]),
            np.concatenate(files) if files else None,
            np.concatenate(starts_) if starts_ else None,
        )

    def placed(self, file: Ints, start: Ints) -> ChunkTable:
        """The same chunks, with where they lie."""
        return replace(self, file=file, start=start)

    def nbytes(self, tensors: TensorTable) -> Ints:
        """Bytes of each chunk."""
        return self.boxes.volumes() * tensors.itemsize[self.tensor]


@dataclass(frozen=True, eq=False)
class ValueTable:
    """One row per stored plain value."""

    names: Sequence[str]
    """Fully qualified names."""
    rank: Ints
    """Rank that stores it."""
    slot: Ints
    """Its place among the values of that rank."""
    file: Ints | None = None
    """Which file it lies in, once that is decided."""

    def __len__(self) -> int:
        """Number of values."""
        return len(self.rank)

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        """Name to row."""
        return {name: row for row, name in enumerate(self.names)}


class StateColumns(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """`Metadata.state_dict_metadata` over the tables."""

    def __init__(
        self,
        tensors: TensorTable,
        values: ValueTable,
        chunks_of: Callable[[int], ChunkTable],
        chunks: ChunkTable | None = None,
        prefetch: Callable[[Sequence[int]], None] | None = None,
        chunks_among: Callable[[Ints], tuple[ChunkTable, Ints]] | None = None,
    ) -> None:
        """`chunks_of(row)` gives the chunks of a tensor and may read them.

        `chunks` are all of them, where they are in memory; `prefetch(rows)` reads many at once;
        `chunks_among(rows)` gives those of many tensors in one table.
        """
        self.tensors = tensors
        self.values_table = values
        self.chunks_of = chunks_of
        self.chunks = chunks
        self._prefetch = prefetch
        self._chunks_among = chunks_among

    def prefetch(self, rows: Sequence[int]) -> None:
        """Make `chunks_of` cheap for these tensors."""
        if self._prefetch is not None:
            self._prefetch(rows)

    def chunks_among(self, rows: Ints) -> tuple[ChunkTable, Ints]:
        """The chunks of these tensors, given in order and each once, and where those of each begin.

        One more entry for the end.
        """
        if self._chunks_among is not None:
            return self._chunks_among(rows)
        if self.chunks is None:
            tables = [self.chunks_of(row) for row in rows.tolist()]
            return ChunkTable.join(tables), starts(np.array([len(t) for t in tables], np.int64))
        low = np.searchsorted(self.chunks.tensor, rows)
        counts = np.searchsorted(self.chunks.tensor, rows, "right") - low
        begin = starts(counts)
        taken = np.repeat(low - begin[:-1], counts) + np.arange(begin[-1])
        return self.chunks.take(taken), begin

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """Look one name up."""
        row = self.tensors.row_of.get(name)
        if row is None:
            if name in self.values_table.row_of:
                return BytesStorageMetadata()
            raise KeyError(name)
        shape = self.tensors.shape(row)
        boxes = self.chunks_of(self.tensors.stored_row(row)).boxes
        matrix = (len(boxes), len(shape))
        chunks = ChunkList(boxes.offsets.reshape(matrix), boxes.sizes.reshape(matrix))
        return TensorStorageMetadata(self.tensors.properties(row), shape, chunks)

    def __iter__(self) -> Iterator[str]:
        """Tensors, then values."""
        yield from self.tensors.names
        yield from self.values_table.names

    def __len__(self) -> int:
        """Number of names."""
        return len(self.tensors) + len(self.values_table)


class LocationColumns(Mapping[MetadataIndex, StorageLocation]):
    """`Metadata.storage_data` over the tables.

    A value's location is that of its file's values entry; which of them it is, is in the index.
    """

    def __init__(
        self,
        state: StateColumns,
        files: Sequence[str],
        value_ranges: Sequence[tuple[int, int]],
    ) -> None:
        """`value_ranges` gives the values entry of each file: first byte and length."""
        self._state = state
        self.files = files
        self.ranges = value_ranges

    def __getitem__(self, key: MetadataIndex) -> StorageLocation:
        """Look one chunk or value up; the hint of the key is tried first."""
        tensors = self._state.tensors
        row = tensors.row_of.get(key.fqn)
        if row is None:
            return self._value(key)
        stored = tensors.stored_row(row)
        chunks = self._state.chunks_of(stored)
        at = self._find(chunks, key)
        assert chunks.file is not None
        assert chunks.start is not None
        nbytes = int(np.prod(chunks.boxes[at].sizes, dtype=np.int64)) * int(
            tensors.itemsize[stored]
        )
        return StorageLocation(self.files[int(chunks.file[at])], int(chunks.start[at]), nbytes)

    def _value(self, key: MetadataIndex) -> StorageLocation:
        values = self._state.values_table
        row = values.row_of.get(key.fqn)
        if row is None or values.file is None or key.offset:
            raise KeyError(key)
        file = int(values.file[row])
        return StorageLocation(self.files[file], *self.ranges[file])

    @staticmethod
    def _find(chunks: ChunkTable, key: MetadataIndex) -> int:
        ndim = len(chunks.boxes.offsets) // max(len(chunks), 1)
        offsets = chunks.boxes.offsets.reshape(len(chunks), ndim)
        if key.offset is None or key.offset == ():
            if len(chunks) == 1 and not offsets.any():
                return 0
            if ndim:
                raise KeyError(key)
        hint = key.index
        if hint is not None and 0 <= hint < len(chunks) and tuple(offsets[hint]) == key.offset:
            return hint
        if key.offset is None or len(key.offset) != ndim:
            raise KeyError(key)
        found = np.flatnonzero((offsets == np.array(key.offset, np.int64)).all(axis=1))
        if len(found) == 0:
            raise KeyError(key)
        return int(found[0])

    def __iter__(self) -> Iterator[MetadataIndex]:
        """Every chunk of every tensor, then every value."""
        for row, name in enumerate(self._state.tensors.names):
            boxes = self._state.chunks_of(self._state.tensors.stored_row(row)).boxes
            for hint in range(len(boxes)):
                yield MetadataIndex(name, boxes[hint].offsets, hint)
        for name in self._state.values_table.names:
            yield MetadataIndex(name)

    def __len__(self) -> int:
        """Number of chunks and values."""
        tensors = self._state.tensors
        rows = range(len(tensors))
        chunks = sum(len(self._state.chunks_of(tensors.stored_row(row))) for row in rows)
        return chunks + len(self._state.values_table)
