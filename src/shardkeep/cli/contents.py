# SPDX-License-Identifier: Apache-2.0
"""What `show` finds in a checkpoint: totals, and one row for each name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import msgspec
import numpy as np

from shardkeep import values
from shardkeep.cli.texts import human_size, short_repr
from shardkeep.errors import CheckpointError, CorruptionError, UnsafeCheckpointError
from shardkeep.foreign.reader import ForeignReader
from shardkeep.formats.native.reader import NativeReader
from shardkeep.storage import find_reader

__all__ = ["Contents", "Row", "TensorRow", "Totals", "ValueRow", "matching", "read_contents"]

MAX_VALUES = 64 << 20
"""Bytes of plain values that are read to show them; beyond, only their names are shown."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The checkpoint as a whole."""

    path: str
    """Where it lies."""
    system: str
    """Who wrote it."""
    tensors: int
    """Names that are tensors, ties included."""
    values: int
    """Names that are plain values."""
    chunks: int
    """Stored pieces of tensors."""
    files: int
    """All files: the record, the index and the data files."""
    tensor_bytes: int
    """Bytes of all tensors, ties counted once."""
    file_bytes: int
    """Bytes of all files."""
    user: Mapping[str, Any]
    """What whoever saved it put beside it."""
    format: tuple[int, int] | None = None
    """Version of the native format, major and minor; this and the rest only of ours."""
    kept_bytes: int = 0
    """Bytes of files that an earlier checkpoint has too."""
    ranks: int | None = None
    """Processes that saved it, if the record says so."""
    saved_at: str | None = None
    """When, if the record says so."""
    library_version: str | None = None
    """Of the library that wrote it."""
    save_id: str | None = None
    """Of the save that wrote it."""
    digest: str | None = None
    """Of the record."""
    requires: tuple[str, ...] = ()
    """Features a reader must know."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor."""

    name: str
    """Fully qualified."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """Name of its element type."""
    chunks: int
    """Pieces it is stored in."""
    nbytes: int
    """Bytes of all elements."""
    files: tuple[str, ...]
    """Files its pieces lie in."""
    same_as: str | None
    """The tensor that holds its bytes, where the two are tied."""


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One plain value."""

    name: str
    """Fully qualified."""
    type: str | None
    """Name of its type, where it was read."""
    text: str
    """What it is, in short."""
    file: str
    """The file it lies in."""


Row: TypeAlias = TensorRow | ValueRow


@dataclass(frozen=True, slots=True)
class Contents:
    """Totals and rows."""

    totals: Totals
    """Of the whole checkpoint, whatever names were asked for."""
    rows: Sequence[Row]
    """The names asked for, in the order of the saved state."""
    problems: Sequence[str]
    """Damage met on the way."""


class _Format(msgspec.Struct):
    major: int
    minor: int = 0


class _RecordHead(msgspec.Struct):
    """The members of the record that the reader checks but does not keep."""

    format: _Format


def read_contents(path: str, glob: str | None = None) -> Contents:
    """Read the record, the index, and the values unless they are large."""
    if issubclass(find_reader(path), ForeignReader):
        from shardkeep.cli.foreign_contents import read_foreign

        return read_foreign(ForeignReader(path), glob)
    reader = NativeReader(path)
    try:
        metadata = reader.read_metadata()
        assert metadata.planner_data is not None
        names = metadata.planner_data.names
        if glob is not None:
            names = matching(names, glob)
        value_names = [name for name in names if name in reader.index.values.row_of]
        shown, problems = _value_rows(reader, value_names)
        tensor_rows = [reader.index.tensors.row_of[n] for n in names if n not in shown]
        _prefetch(reader, tensor_rows)
        rows: list[Row] = [shown[n] if n in shown else _tensor_row(reader, n) for n in names]
        return Contents(_totals(reader), rows, problems)
    finally:
        reader.close()


def matching(names: Sequence[str], glob: str) -> list[str]:
    """The name itself if it is there, else what the glob selects, or what a container holds."""
    if glob in names:
        return [glob]  # a name may hold brackets, which mean something else in a glob
    inside = f"{glob}.*"
    return [n for n in names if fnmatchcase(n, glob) or fnmatchcase(n, inside)]


def _totals(reader: NativeReader) -> Totals:
    record, index = reader.record, reader.index
    head = msgspec.json.decode(reader.announcement(), type=_RecordHead)
    tensors = index.tensors
    nbytes = (tensors.volumes * tensors.itemsize)[tensors.alias_of < 0]
    ranks, saved_at = record.summary.get("ranks"), record.summary.get("saved_at")
    sizes = [len(reader.announcement()), record.index.size, *(row.size for row in record.files)]
    return Totals(
        path=reader.checkpoint_id,
        system=reader.system,
        format=(head.format.major, head.format.minor),
        tensors=len(tensors),
        values=len(index.values),
        chunks=int(index.first_chunk[-1]),
        files=len(sizes),
        tensor_bytes=int(nbytes.sum()),
        file_bytes=sum(sizes),
        kept_bytes=sum(row.size for row in record.files if row.kept),
        ranks=ranks if isinstance(ranks, int) else None,
        saved_at=saved_at if isinstance(saved_at, str) else None,
        library_version=record.version,
        save_id=record.save_id,
        digest=record.digest,
        requires=record.requires,
        user=record.user,
    )


def _prefetch(reader: NativeReader, rows: Sequence[int]) -> None:
    if len(reader.record.files) > 1:  # with one file there is nothing to look up
        tensors = reader.index.tensors
        reader.index.state.prefetch([tensors.stored_row(row) for row in rows])


def _tensor_row(reader: NativeReader, name: str) -> TensorRow:
    index = reader.index
    tensors = index.tensors
    row = tensors.row_of[name]
    stored = tensors.stored_row(row)
    chunks = int(index.first_chunk[stored + 1] - index.first_chunk[stored])
    nbytes = int(tensors.volumes[row]) * int(tensors.itemsize[row])
    same_as = None if stored == row else tensors.names[stored]
    files = _files_of(reader, stored) if chunks else ()
    dtype = tensors.properties(row).dtype
    return TensorRow(name, tensors.shape(row), dtype, chunks, nbytes, files, same_as)


def _files_of(reader: NativeReader, row: int) -> tuple[str, ...]:
    files = reader.record.files
    if len(files) == 1:
        return (files[0].name,)
    found = reader.index.chunks_of(row).file
    assert found is not None
    return tuple(files[number].name for number in np.unique(found).tolist())


def _value_rows(
    reader: NativeReader, names: Sequence[str]
) -> tuple[dict[str, ValueRow], list[str]]:
    """Rows by name; a file whose values are damaged or large leaves its rows without content."""
    table, files = reader.index.values, reader.record.files
    assert table.file is not None
    by_file: dict[int, list[str]] = defaultdict(list)
    for name in names:
        by_file[int(table.file[table.row_of[name]])].append(name)
    shown: dict[str, ValueRow] = {}
    problems = []
    left = MAX_VALUES
    for number, here in sorted(by_file.items()):
        file = files[number]
        size = file.payload - (file.values or 0)
        unread = f"<not read: among {human_size(size)} of values>"
        found: dict[str, bytes] = {}
        if size <= left:
            left -= size
            try:
                reader.read_values(here, lambda at, data: found.update({here[at]: data}))  # noqa: B023
            except CorruptionError as error:
                problems.append(str(error))
                unread = "<damaged>"
        for name in here:
            kind, text = _described(found[name]) if name in found else (None, unread)
            shown[name] = ValueRow(name, kind, text, file.name)
    return shown, problems


def _described(data: bytes) -> tuple[str | None, str]:
    """Type and short text of an encoded value; nothing is imported or run for it."""
    try:
        value = values.decode(data, foreign="plain")
    except UnsafeCheckpointError:
        return "pickle", "<pickle>"
    except CheckpointError as error:
        return None, f"<{error}>"
    return type(value).__name__, short_repr(value)
