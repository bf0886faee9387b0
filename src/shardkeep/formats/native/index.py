# SPDX-License-Identifier: Apache-2.0
"""The index: which box of which tensor lies in which file at which byte.

A tensor table of O(tensors) and chunk columns sorted by tensor, then by offset. Opening reads the
table; the chunk rows of a tensor are read when that tensor is looked at.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardkeep.boxes import tiled
from shardkeep.columns import Boxes, Column, Ints, Strings, starts
from shardkeep.engine.verified import VerifiedFile
from shardkeep.errors import FormatError
from shardkeep.formats.native.header import MAX_HEADER, Entry, header_room, read_header
from shardkeep.formats.native.nesting import StoredStructure, reading_tables
from shardkeep.stores.local import storage_errors
from shardkeep.structure import MAX_NAME_BYTES, TENSOR, VALUE, Structure
from shardkeep.tables import NO_ALIAS, ChunkTable, StateColumns, TensorTable, ValueTable
from shardkeep.wire import decode_kinds, encode_kinds

__all__ = ["Index", "IndexEntries", "index_entries"]

RUN_ROWS = 1 << 18
"""Chunk rows read together, unless a single tensor has more."""
BLOCK_ROWS = 4096
"""Chunk rows that nobody wants, but that lie in the same blocks of the index as those around."""
FEW = 64
"""Tensors whose chunk rows are kept once they were read: views ask for them again and again."""

_CODES = {"<i8": "I64", "<i4": "I32", "<u2": "U16", "|u1": "U8"}
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()}
_NARROW = {"chunk.file": "I32", "value.file": "I32", "tensor.kind": "U16"} | dict.fromkeys(
    ("kinds", "structure", "tensor.names", "value.names"), "U8"
)
"""Columns that are not of 64 bits."""


@dataclass(frozen=True, slots=True)
class IndexEntries:
    """The columns of an index, in the order they lie in the file."""

    columns: dict[str, Column]
    """Name to column."""
    entries: dict[str, Entry]
    """Name to where it lies."""
    room: int
    """Where payload starts."""
    payload: int
    """Where payload ends."""


def index_entries(
    structure: Structure, tensors: TensorTable, chunks: ChunkTable, values: ValueTable
) -> IndexEntries:
    """Lay the tables out as entries of one file."""
    assert chunks.file is not None
    assert chunks.start is not None
    assert values.file is not None
    names, others = Strings.of(tensors.names), Strings.of(values.names)
    first_chunk = np.searchsorted(chunks.tensor, np.arange(len(tensors) + 1))
    columns: dict[str, Column] = {
        "tensor.name_start": names.start,
        "tensor.shape_start": tensors.shape_start,
        "tensor.shapes": tensors.shapes,
        "tensor.first_chunk": first_chunk,
        "tensor.alias_of": tensors.alias_of,
        "value.name_start": others.start,
        "value.slot": values.slot,
        "leaf.row": _leaf_rows(structure, tensors, values),
        "chunk.offsets": chunks.boxes.offsets,
        "chunk.sizes": chunks.boxes.sizes,
        "chunk.start": chunks.start,
        "chunk.file": chunks.file.astype("<i4"),
        "value.file": values.file.astype("<i4"),
        "tensor.kind": tensors.kind.astype("<u2"),
        "kinds": np.frombuffer(encode_kinds(tensors.kinds), np.uint8),
        "structure": np.frombuffer(structure.encode(), np.uint8),
        "tensor.names": np.frombuffer(names.blob, np.uint8),
        "value.names": np.frombuffer(others.blob, np.uint8),
    }
    columns = {
        key: np.ascontiguousarray(column, column.dtype.newbyteorder("<"))
        for key, column in columns.items()
    }
    at = room = header_room(256 + 128 * (len(columns) + 1))
    entries = {}
    for key, column in columns.items():
        entries[key] = Entry(_CODES[column.dtype.str], column.shape, at, at + column.nbytes)
        at += column.nbytes
    return IndexEntries(columns, entries, room, at)


def _leaf_rows(structure: Structure, tensors: TensorTable, values: ValueTable) -> Ints:
    """Row of each leaf among the tensors or the values: names need not be derived to be read."""
    tables = {TENSOR: tensors.row_of, VALUE: values.row_of}
    pairs = zip(structure.kinds, structure.names, strict=True)
    return np.fromiter((tables[kind][name] for kind, name in pairs), np.int64)


class Index:
    """An index being read: the tensor table in memory, chunk rows on demand."""

    def __init__(self, file: VerifiedFile, files: int, nbytes: int, *, nested: bool = True) -> None:
        """Read the table; `files` is how many data files there are, `nbytes` what they hold.

        Without `nested`, the structure stays unread: names and boxes do not need it.
        """
        self._nested = nested
        self._file = file
        self._files = files
        self._nbytes = nbytes
        self._held: dict[int, ChunkTable] = {}
        with storage_errors(f"reading {file.name}"):
            length = int.from_bytes(file.read_range(0, 8), "little")
        if not 0 < length <= min(MAX_HEADER, file.layout.payload - 8):
            raise FormatError(f"{file.name}: claims a header of {length} bytes")
        with storage_errors(f"reading {file.name}"):
            header = file.read_range(0, 8 + length)
        self._entries, _ = read_header(header, file.name, file.layout.file_size)
        with reading_tables(file.name):
            self._read_tables()

    def _column(self, key: str, low: int = 0, high: int | None = None) -> Column:
        entry = self._entries[key]
        dtype = _DTYPES[entry.dtype]
        wrong = entry.dtype != _NARROW.get(key, "I64")
        if wrong or len(entry.shape) != 1 or entry.stop > self._file.layout.payload:
            raise ValueError(f"column {key} is not one row of numbers")
        high = entry.shape[0] if high is None else high
        if not 0 <= low <= high <= entry.shape[0]:
            raise ValueError(f"column {key} has no rows {low} to {high}")
        with storage_errors(f"reading {self._file.name}"):
            data = self._file.read_range(
                entry.start + low * dtype.itemsize, (high - low) * dtype.itemsize
            )
        return np.frombuffer(data, dtype)

    def _read_tables(self) -> None:
        names = self._strings("tensor.names", "tensor.name_start")
        count = len(names)
        shape_start = _checked_starts(self._column("tensor.shape_start"), count, "shapes")
        shapes = self._column("tensor.shapes")
        kinds = decode_kinds(self._column("kinds").tobytes())
        kind, alias_of = self._column("tensor.kind"), self._column("tensor.alias_of")
        self.first_chunk = _checked_starts(self._column("tensor.first_chunk"), count, "chunks")
        fits = (
            len(kind) == len(alias_of) == count
            and int(shape_start[-1]) == len(shapes)
            and (count == 0 or int(kind.max()) < len(kinds))
            and bool((shapes >= 0).all())
            and bool((alias_of < count).all())
            and bool((alias_of >= NO_ALIAS).all())
            and bool((alias_of[alias_of[alias_of >= 0]] == NO_ALIAS).all())
            and int(np.diff(shape_start).max(initial=0)) <= 32
        )
        if not fits:
            raise ValueError("columns do not fit each other")
        self.tensors = TensorTable(names, kinds, kind, shape_start, shapes, alias_of)
        self._check_tensors()
        if {self._entries[f"chunk.{k}"].shape for k in ("start", "file")} != {
            (int(self.first_chunk[-1]),)
        }:
            raise ValueError("chunk columns do not fit the tensor table")
        self.coord_start = starts(np.diff(self.first_chunk) * np.diff(shape_start))
        if {self._entries[f"chunk.{k}"].shape for k in ("offsets", "sizes")} != {
            (int(self.coord_start[-1]),)
        }:
            raise ValueError("chunk columns do not fit the tensor table")
        value_names = self._strings("value.names", "value.name_start")
        slot, file = self._column("value.slot"), self._column("value.file").astype(np.int64)
        if len(slot) != len(value_names) or len(file) != len(value_names):
            raise ValueError("value columns do not fit each other")
        if len(file) and not (file.min() >= 0 and file.max() < self._files and slot.min() >= 0):
            raise ValueError("a value lies in a file that is not there")
        self.values = ValueTable(value_names, np.full(len(slot), -1), slot, file)
        self._structure = self._read_structure() if self._nested else None

    def _strings(self, blob: str, start: str) -> list[str]:
        text = self._column(blob).tobytes()
        offsets = self._column(start)
        _checked_starts(offsets, len(offsets) - 1, blob)
        if int(offsets[-1]) != len(text):
            raise ValueError(f"{blob} is not as long as its offsets say")
        names = Strings(text, offsets).tolist()
        if len(set(names)) != len(names):
            raise ValueError(f"{blob} has a name twice")
        if int(np.diff(offsets).max(initial=0)) > MAX_NAME_BYTES:
            raise ValueError(f"{blob} has a name of more than {MAX_NAME_BYTES} bytes")
        return names

    def _check_tensors(self) -> None:
        """No product may leave 64 bits, and the tensors may not claim more than the files hold."""
        tensors, nbytes = self.tensors, 0
        sizes = _products(tensors)
        if (tensors.alias_of == NO_ALIAS).all() and float(sizes.max(initial=0)) < 2**62:
            nbytes = sum(map(int, (tensors.volumes * tensors.itemsize).tolist()))
            if nbytes > self._nbytes:
                raise ValueError(f"tensors of {nbytes} bytes in files of {self._nbytes}")
            return
        for row in range(len(tensors)):
            shape, item = tensors.shape(row), int(tensors.itemsize[row])
            if math.prod(max(n, 1) for n in shape) * item >= 2**63:
                raise ValueError(f"{tensors.names[row]} claims shape {shape}")
            if int(tensors.alias_of[row]) == NO_ALIAS:
                nbytes += math.prod(shape) * item
                continue
            stored = tensors.stored_row(row)
            if tensors.shape(stored) != shape or tensors.dtype(stored) != tensors.dtype(row):
                raise ValueError(f"{tensors.names[row]} differs from what it is an alias of")
        if nbytes > self._nbytes:
            raise ValueError(f"tensors of {nbytes} bytes in files of {self._nbytes}")

    def _read_structure(self) -> StoredStructure:
        tables = {TENSOR: self.tensors.names, VALUE: self.values.names}
        return StoredStructure(
            self._column("structure").tobytes(), self._column("leaf.row"), tables, self._file.name
        )

    @property
    def structure(self) -> StoredStructure:
        """The nesting; it is looked into when somebody asks."""
        assert self._structure is not None
        return self._structure

    @property
    def state(self) -> StateColumns:
        """The tables as a mapping."""
        return StateColumns(
            self.tensors,
            self.values,
            self.chunks_of,
            prefetch=self.prefetch,
            chunks_among=self.chunks_among,
        )

    def chunks_of(self, row: int) -> ChunkTable:
        """The chunks of one tensor."""
        held = self._held.get(row)
        if held is None:
            held = self._rows(row, row + 1)
            self._held[row] = held
        return held

    def prefetch(self, rows: Sequence[int]) -> None:
        """Read the chunks of many tensors and keep them for `chunks_of`."""
        wanted = np.array(sorted(set(rows) - self._held.keys()), np.int64)
        table, begin = self._among(wanted)
        for row, (low, high) in zip(wanted.tolist(), pairwise(begin.tolist()), strict=True):
            self._held[row] = table.part(low, high)

    def chunks_among(self, rows: Ints) -> tuple[ChunkTable, Ints]:
        """The chunks of many tensors, read with few requests, and where those of each begin."""
        if len(rows) > FEW:
            return self._among(rows)
        self.prefetch(rows.tolist())
        tables = [self.chunks_of(row) for row in rows.tolist()]
        return ChunkTable.join(tables), starts(np.array(list(map(len, tables)), np.int64))

    def _among(self, rows: Ints) -> tuple[ChunkTable, Ints]:
        counts = self.first_chunk[rows + 1] - self.first_chunk[rows]
        tables = []
        for run in self._runs(rows):
            low, high = int(run[0]), int(run[-1]) + 1
            table = self._rows(low, high)
            if len(run) < high - low:
                of_run = counts[np.searchsorted(rows, run)]
                begin = self.first_chunk[run] - self.first_chunk[low]
                taken = np.repeat(begin - starts(of_run)[:-1], of_run)
                table = table.take(taken + np.arange(len(taken)))
            tables.append(table)
        return ChunkTable.join(tables), starts(counts)

    def _runs(self, rows: Ints) -> Iterator[Ints]:
        """Cut rows where what lies between two is not worth reading, or where they are too many.

        What is computed of rows on the way takes several times their memory.
        """
        if len(rows) == 0:
            return
        gaps = self.first_chunk[rows[1:]] - self.first_chunk[rows[:-1] + 1]
        for run in np.split(rows, np.flatnonzero(gaps > BLOCK_ROWS) + 1):
            at = self.first_chunk[run] - self.first_chunk[run[0]]
            yield from np.split(run, np.flatnonzero(np.diff(at // RUN_ROWS)) + 1)

    def _rows(self, low: int, high: int) -> ChunkTable:
        """The chunks of tensors [low, high)."""
        try:
            return self._checked_rows(low, high)
        except (ValueError, KeyError) as error:
            raise FormatError(f"{self._file.name}: chunk rows are not valid: {error!r}") from error

    def _checked_rows(self, low: int, high: int) -> ChunkTable:
        first = self.first_chunk[low : high + 1]
        coords = self.coord_start[low : high + 1]
        a, b, c, d = int(first[0]), int(first[-1]), int(coords[0]), int(coords[-1])
        offsets, sizes = self._column("chunk.offsets", c, d), self._column("chunk.sizes", c, d)
        start, file = self._column("chunk.start", a, b), self._column("chunk.file", a, b)
        if b > a and not (file.min() >= 0 and file.max() < self._files and start.min() >= 0):
            raise ValueError("a chunk lies in a file that is not there")
        if d > c and (offsets.min() < 0 or sizes.min() < 0):
            raise ValueError("a box is negative")
        counts = np.diff(first)
        tensor = np.repeat(np.arange(low, high), counts)
        ndim = np.repeat(np.diff(self.tensors.shape_start)[low:high], counts)
        boxes = Boxes(starts(ndim), offsets, sizes)
        self._check_boxes(low, high, tensor, boxes)
        unknown = np.full(b - a, -1)
        return ChunkTable(tensor, boxes, unknown, unknown, file.astype(np.int64), start)

    def _check_boxes(self, low: int, high: int, tensor: Ints, boxes: Boxes) -> None:
        """The chunks of every tensor cover each of its elements once; those of an alias none."""
        tensors = self.tensors
        shape_start = tensors.shape_start[low : high + 1] - tensors.shape_start[low]
        shapes = tensors.shapes[int(tensors.shape_start[low]) : int(tensors.shape_start[high])]
        covered = tiled(shape_start, shapes, tensor - low, boxes, secrets.randbits(62))
        empty = np.diff(self.first_chunk[low : high + 1]) == 0
        fine = np.where(tensors.alias_of[low:high] == NO_ALIAS, covered, empty)
        if not fine.all():
            wrong = tensors.names[low + int(np.argmin(fine))]
            raise ValueError(f"the chunks of {wrong} do not tile it")


def _products(tensors: TensorTable) -> npt.NDArray[np.float64]:
    """Bytes of each tensor, a dimension of none counted as one; about right at any size."""
    shapes = Boxes(tensors.shape_start, tensors.shapes, tensors.shapes)
    out: npt.NDArray[np.float64] = tensors.itemsize.astype(np.float64)
    for _, rows, at in shapes.dimensions():
        out[rows] *= np.maximum(tensors.shapes[at], 1)
    return out


def _checked_starts(column: Column, count: int, what: str) -> Ints:
    # Compared, not subtracted: a difference could leave 64 bits.
    if len(column) != count + 1 or int(column[0]) != 0 or (column[1:] < column[:-1]).any():
        raise ValueError(f"offsets of {what} are not in order")
    return column
